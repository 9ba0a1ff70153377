"""The sampler: chunked prefill and a decode loop over a fixed number of cache rows.

Invariant between ticks: a slot's cache holds its whole sequence except the last token, the slot's
*current* token.  Feeding the current token gives the logits of its successor, so prefill never
needs logits, decode always starts the same way (after a prompt, after a tool result, in the middle
of a turn), and a turn's `<|end|>` enters the cache together with the tool result behind it.

Nothing here is compiled more than once per shape: one decode loop per cache view and one prefill
chunk per bucket, whatever the sessions do.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from composer_jax.errors import UserError
from composer_jax.models import cache as cache_lib
from composer_jax.models import transformer
from composer_jax.models.config import ModelConfig
from composer_jax.rollout import sampling
from composer_jax.rollout.prefill import PrefillItem, plan
from composer_jax.rollout.ticks import SlotOutput, SlotRequest


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Shapes and sampling of the engine (all values are our choice; measured on two CPU cores).

  Attributes:
    slots: sessions that generate side by side.
    max_len: cache length, the longest sequence of a session.
    prefill_buckets: widths of a prefill chunk; a forced piece of text is cut into the fewest
      chunks, each padded to the smallest bucket that holds it.
    prefill_tokens: rows times width of one prefill chunk.
    decode_chunk: most tokens a slot samples in one tick.  Short chunks serve finished tool calls
      and new weights sooner, long ones spend less on the host.
    cache_views: decode attends over the first of these lengths that holds every active slot,
      `max_len` always being the last.
    temperature: of the sampling; 0 is greedy and refused for training.
    seed: with the session's id it determines the session's random stream.
  """

  slots: int = 96
  max_len: int = 256
  prefill_buckets: tuple[int, ...] = (8, 16, 32, 64)
  prefill_tokens: int = 256
  decode_chunk: int = 8
  cache_views: tuple[int, ...] = (128,)
  temperature: float = 1.0
  seed: int = 0

  def __post_init__(self):
    if min(self.slots, self.max_len, self.decode_chunk, *self.prefill_buckets) < 1:
      raise ValueError('slots, max_len, decode_chunk and prefill_buckets must be at least 1')
    if self.prefill_tokens < max(self.prefill_buckets):
      raise ValueError('prefill_tokens must hold at least one row of the widest prefill bucket')
    if self.temperature < 0:
      raise ValueError(f'temperature must not be negative, got {self.temperature}')


class Engine:
  """Owns the cache and the per-slot state; see `ticks.TickEngine` for the interface.

  Args:
    model_config: the model.
    config: shapes and sampling.
    end_id: the token that ends a turn.
  """

  def __init__(self, model_config: ModelConfig, config: EngineConfig, end_id: int):
    if not 0 <= end_id < model_config.vocab_size:
      raise UserError(f'end id {end_id} is outside the vocabulary of {model_config.vocab_size}')
    self.config = config
    self.slots = config.slots
    self.max_len = config.max_len
    self.temperature = config.temperature
    self.routing_shape = (
        model_config.num_hidden_layers - model_config.first_k_dense_replace,
        model_config.num_experts_per_tok,
    )
    self._cache = cache_lib.init_cache(model_config, config.slots, config.max_len)
    self._length = np.zeros(config.slots, np.int32)  # host copy of the cache's lengths
    self._current = np.zeros(config.slots, np.int32)
    self._keys = np.zeros((config.slots, 2), np.uint32)
    self._views = sorted({*(v for v in config.cache_views if v < config.max_len), config.max_len})
    # Unrolled layers make XLA:CPU copy more of the cache: 35 against 25 ms a step at N=96, M=256.
    model_config = dataclasses.replace(model_config, scan_unroll=1)
    self._prefill = functools.partial(_prefill, model_config)
    self._decode = functools.partial(_decode, model_config, end_id=end_id,
                                     steps=config.decode_chunk, greedy=config.temperature == 0)

  def tick(self, params: Any, requests: Sequence[SlotRequest]) -> list[SlotOutput]:
    """Feeds and samples for the requested slots; all others stay as they are.

    Raises:
      ValueError: a sequence would outgrow the cache, or a slot was never started.
    """
    limits = np.zeros(self.slots, np.int32)
    items = []
    for request in requests:
      items += self._start(request)
      limits[request.slot] = min(request.limit, self.config.decode_chunk)
      if self._length[request.slot] + 1 + request.limit > self.max_len:
        raise ValueError(f'slot {request.slot} would outgrow its {self.max_len} cache entries')
    fed = self._run_prefill(params, items)
    view = next(v for v in self._views if (self._length + limits).max(where=limits > 0,
                                                                      initial=0) <= v)
    self._cache, out = self._decode(
        params, self._cache, self._current, self._keys, limits, self.temperature or 1.0, view=view)
    tokens, logprobs, routing, counts, ended = jax.device_get(out)
    outputs = []
    for request in requests:
      slot, n = request.slot, counts[request.slot]
      self._length[slot] += n
      self._current[slot] = tokens[n - 1, slot]
      records = [*fed.get(slot, []), routing[:n, :, slot]]
      outputs.append(SlotOutput(slot, tokens[:n, slot], logprobs[:n, slot],
                                np.concatenate(records), bool(ended[slot])))
    return outputs

  def _start(self, request: SlotRequest) -> list[PrefillItem]:
    """Updates the slot's host state for the forced tokens and returns what to prefill."""
    slot, fresh = request.slot, request.session_id is not None
    if fresh:
      self._keys[slot] = sampling.session_key(self.config.seed, request.session_id)
      self._length[slot] = 0
      text = np.asarray(request.feed, np.int32)
    elif request.feed:
      text = np.asarray([self._current[slot], *request.feed], np.int32)
    else:
      return []
    if fresh and not request.feed:
      raise ValueError(f'slot {slot}: a new session needs at least one token')
    self._current[slot] = text[-1]
    self._length[slot] += len(text) - 1
    return plan(slot, text[:-1], fresh, self.config.prefill_buckets)

  def _run_prefill(self, params: Any, items: list[PrefillItem]) -> dict[int, list[np.ndarray]]:
    """Runs the chunks, same width together, in order per slot; returns routing by slot."""
    pending, fed = [], {}
    for order, width in sorted({(item.order, item.width) for item in items}):
      group = [item for item in items if (item.order, item.width) == (order, width)]
      rows = self.config.prefill_tokens // width
      for start in range(0, len(group), rows):
        part = group[start:start + rows]
        self._cache, routing = self._prefill(params, self._cache, *_pad(part, rows, width,
                                                                        self.slots))
        pending.append((part, routing))
    for part, routing in pending:  # only now, so that the chunks run without a host round trip
      routing = np.asarray(routing)
      for row, item in enumerate(part):
        fed.setdefault(item.slot, []).append(
            routing[:, row, :len(item.tokens)].transpose(1, 0, 2))
    return fed


def prefill_chunk(
    model_config: ModelConfig,
    params: Any,
    cache: cache_lib.Cache,
    tokens: Int[Array, 'R P'],
    counts: Int[Array, 'R'],
    slots: Int[Array, 'R'],
    fresh: Bool[Array, 'R'],
) -> tuple[cache_lib.Cache, UInt16[Array, 'L R P K']]:
  """Appends tokens to R of the cache's rows.

  The rows are gathered into a small batch and scattered back: most ticks feed few of the slots.

  Args:
    model_config: the model.
    params: its parameters.
    cache: all slots.
    tokens: text, padded at the end.
    counts: valid tokens per row, 0 allowed.
    slots: cache row of each row, distinct; an index past the last slot marks an unused row.
    fresh: the row starts a new session: what the slot held before is wiped.

  Returns:
    The cache, and the chosen experts of every token (garbage at padding).
  """
  rows = jnp.take(cache.latent, slots, axis=1, mode='clip')
  rows = jnp.where(fresh[None, :, None, None], 0, rows)
  length = jnp.where(fresh, 0, jnp.take(cache.length, slots, mode='clip'))
  valid = jnp.arange(tokens.shape[1])[None] < counts[:, None]
  out = transformer.forward(
      model_config, params, tokens, segment_ids=valid.astype(jnp.int32),
      cache=cache_lib.Cache(rows, length), output='hidden')
  cache = cache_lib.Cache(
      cache.latent.at[:, slots].set(out.cache.latent, mode='drop', unique_indices=True),
      cache.length.at[slots].set(out.cache.length, mode='drop', unique_indices=True))
  return cache, out.router.indices.astype(jnp.uint16)


def decode_chunk(
    model_config: ModelConfig,
    params: Any,
    cache: cache_lib.Cache,
    current: Int[Array, 'N'],
    keys: UInt32[Array, 'N 2'],
    limits: Int[Array, 'N'],
    temperature: Float[Array, ''] | float,
    *,
    end_id: int,
    steps: int,
    greedy: bool,
    view: int,
) -> tuple[cache_lib.Cache, tuple[
    Int[Array, 'C N'], Float[Array, 'C N'], UInt16[Array, 'C L N K'], Int[Array, 'N'],
    Bool[Array, 'N']]]:
  """Samples up to `limits` tokens per slot, until each has ended, for at most `steps` steps.

  Args:
    model_config: the model.
    params: its parameters.
    cache: all slots; holds each sequence but its current token.
    current: the last token of each sequence.
    keys: random stream of each slot.
    limits: most tokens to sample; 0 leaves the slot untouched.
    temperature: of the sampling, above 0.
    end_id: token that ends a turn.
    steps: size C of the outputs.
    greedy: take the arg-max.
    view: attend over the first `view` cache entries; all active sequences must stay within.

  Returns:
    The cache, and (tokens, log-probs, experts of the fed token, number of sampled tokens, ended).
  """
  slots = current.shape[0]
  layers = model_config.num_hidden_layers - model_config.first_k_dense_replace
  outputs = (jnp.zeros((steps, slots), jnp.int32), jnp.zeros((steps, slots), jnp.float32),
             jnp.zeros((steps, layers, slots, model_config.num_experts_per_tok), jnp.uint16))
  seen = cache_lib.Cache(cache.latent[:, :, :view], cache.length)

  def wants_more(state):
    step, _, _, active, _, _, _ = state
    return (step < steps) & jnp.any(active)

  def body(state):
    step, seen, current, active, counts, ended, outputs = state
    out = transformer.forward(
        model_config, params, current[:, None], segment_ids=active[:, None].astype(jnp.int32),
        cache=seen)
    drawn, logprobs = sampling.sample(
        out.logits[:, 0], keys, seen.length + 1, temperature, greedy)
    current = jnp.where(active, drawn, current)
    counts = counts + active
    ended = ended | (active & (drawn == end_id))
    new = (drawn, logprobs, out.router.indices[:, :, 0].astype(jnp.uint16))
    outputs = jax.tree.map(lambda o, x: o.at[step].set(x), outputs, new)
    active = active & ~ended & (counts < limits)
    return step + 1, out.cache, current, active, counts, ended, outputs

  zeros = jnp.zeros(slots, jnp.int32)
  state = (0, seen, current, limits > 0, zeros, zeros > 0, outputs)
  _, seen, _, _, counts, ended, outputs = jax.lax.while_loop(wants_more, body, state)
  latent = seen.latent if view == cache.latent.shape[2] else (
      cache.latent.at[:, :, :view].set(seen.latent))
  # The view cuts off what idle slots hold beyond it, lengths included: theirs stay as they were.
  length = jnp.where(limits > 0, seen.length, cache.length)
  return cache_lib.Cache(latent, length), (*outputs, counts, ended)


# Compiled functions outlive an engine: a second one with the same shapes costs no compilation.
_prefill = jax.jit(prefill_chunk, static_argnames='model_config', donate_argnames='cache')
_decode = jax.jit(decode_chunk, donate_argnames='cache',
                  static_argnames=('model_config', 'end_id', 'steps', 'greedy', 'view'))


def _pad(items: list[PrefillItem], rows: int, width: int, slots: int) -> tuple[np.ndarray, ...]:
  """Returns the arguments of `prefill_chunk` for up to `rows` items of one width."""
  tokens = np.zeros((rows, width), np.int32)
  counts = np.zeros(rows, np.int32)
  # Unused rows get distinct indices past the end: the scatter promises unique ones.
  where = np.arange(slots, slots + rows, dtype=np.int32)
  fresh = np.zeros(rows, bool)
  for row, item in enumerate(items):
    tokens[row, :len(item.tokens)] = item.tokens
    counts[row] = len(item.tokens)
    where[row] = item.slot
    fresh[row] = item.fresh
  return tokens, counts, where, fresh
