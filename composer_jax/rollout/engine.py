"""The sampler: chunked prefill and a decode loop over a fixed number of cache rows.

Invariant between ticks: a slot's cache holds its whole sequence except the last token, the slot's
*current* token.  Feeding the current token gives the logits of its successor, so prefill never
needs logits, decode always starts the same way (after a prompt, after a tool result, in the middle
of a turn), and a turn's `<|end|>` enters the cache together with the tool result behind it.

Nothing here is compiled more than once per shape: per cache view one prefill chunk of each bucket
and one decode loop of each number of rows, whatever the sessions do.  A used slot is not wiped:
entries past a slot's length weigh exactly 0, and numbers that are not finite stop the run where
they are sampled.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from composer_jax.config import INT32_MAX, check_range
from composer_jax.errors import UserError
from composer_jax.models import cache as cache_lib
from composer_jax.models import transformer
from composer_jax.models.config import ModelConfig
from composer_jax.rollout import sampling
from composer_jax.rollout.prefill import PrefillItem, plan
from composer_jax.rollout.ticks import SlotOutput, SlotRequest

Latent = tuple[Float[Array, 'N M C'], ...]  # a layer each


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Shapes and sampling of the engine (all values are our choice; measured on two CPU cores).

  Attributes:
    slots: sessions that generate side by side.
    max_len: cache length, the longest sequence of a session.
    prefill_buckets: widths of a prefill chunk; a forced piece of text is cut into the fewest
      chunks, each padded to the smallest bucket that holds it.
    prefill_tokens: rows times width of one prefill chunk.
    decode_rows: decode runs on the first of these numbers of rows that holds every active slot,
      `slots` always being the last; a step costs as much for an idle row as for an active one.
    decode_chunk: most tokens a slot samples in one tick.  Short chunks serve finished tool calls
      and new weights sooner, long ones spend less on the host.
    cache_views: prefill and decode attend over the shortest of these lengths that holds what the
      slots they serve held before, `max_len` always being the last; each is compiled on its own.
    temperature: of the sampling; 0 is greedy and refused for training.
    seed: with the session's id it determines the session's random stream.
  """

  slots: int = 64
  max_len: int = 256
  prefill_buckets: tuple[int, ...] = (8, 32)
  prefill_tokens: int = 256
  decode_rows: tuple[int, ...] = (32,)
  decode_chunk: int = 6
  cache_views: tuple[int, ...] = (128,)
  temperature: float = 1.0
  seed: int = 0

  def __post_init__(self):
    check_range(self, 0, INT32_MAX, 'seed')
    if not self.prefill_buckets:
      raise ValueError('prefill_buckets: there must be one')
    if min(self.slots, self.max_len, self.decode_chunk, *self.prefill_buckets,
           *self.decode_rows, *self.cache_views) < 1:
      raise ValueError('slots, max_len, decode_chunk, decode_rows, prefill_buckets and cache_views '
                       'must be at least 1')
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
    self._latent = cache_lib.init_cache(model_config, config.slots, config.max_len).latent
    # Lengths live on the host: they follow from the requests and from how much was sampled.
    self._length = np.zeros(config.slots, np.int32)
    self._current = np.zeros(config.slots, np.int32)
    self._keys = np.zeros((config.slots, 2), np.uint32)
    self._rows = sorted({*(n for n in config.decode_rows if n < config.slots), config.slots})
    self._views = sorted({*(v for v in config.cache_views if v < config.max_len), config.max_len})
    self._prefill = functools.partial(_prefill, model_config)
    self._decode = functools.partial(_decode, model_config, end_id=end_id,
                                     steps=config.decode_chunk, greedy=config.temperature == 0)

  def tick(self, params: Any, requests: Sequence[SlotRequest]) -> list[SlotOutput]:
    """Feeds and samples for the requested slots; all others stay as they are.

    Raises:
      ValueError: a sequence would outgrow the cache, or a new session brings no token.
    """
    items = []
    for request in requests:
      items += self._start(request)
    fed = self._run_prefill(params, items)
    tokens, logprobs, routing, counts, ended = self._run_decode(params, requests)
    outputs = []
    for row, request in enumerate(requests):
      slot, n = request.slot, counts[row]
      self._length[slot] += n
      self._current[slot] = tokens[n - 1, row]
      records = [*fed.get(slot, []), routing[:n, :, row]]
      outputs.append(SlotOutput(slot, tokens[:n, row], logprobs[:n, row],
                                np.concatenate(records), bool(ended[row])))
    return outputs

  def _run_decode(self, params: Any, requests: Sequence[SlotRequest]) -> tuple[np.ndarray, ...]:
    """Samples for the requested slots; row i of the results belongs to request i."""
    count = next(rows for rows in self._rows if rows >= len(requests))
    asked = np.asarray([request.slot for request in requests], np.int32)
    whole = count == self.slots  # then row i is slot i, and no row has to be gathered
    rows = asked if whole else np.arange(len(requests))
    # Unused rows read some slot, sample nothing, and are written past the end, i.e. nowhere.
    slots = np.arange(count) if whole else np.arange(self.slots, self.slots + count, dtype=np.int32)
    slots[rows] = asked
    limits = np.zeros(count, np.int32)
    limits[rows] = [min(request.limit, self.config.decode_chunk) for request in requests]
    read = np.minimum(slots, self.slots - 1)
    self._latent, out = self._decode(
        params, self._latent, None if whole else slots, self._length[read], self._current[read],
        self._keys[read], limits, self.temperature or 1.0, view=self._view(self._length[asked]))
    return tuple(part[..., rows, :] if part.ndim == 4 else part[..., rows]
                 for part in jax.device_get(out))

  def _view(self, lengths: Int[np.ndarray, 'n']) -> int:
    """Returns the shortest view that holds this many entries."""
    return next(view for view in self._views if view >= lengths.max())

  def _start(self, request: SlotRequest) -> list[PrefillItem]:
    """Updates the slot's host state for the forced tokens and returns what to prefill."""
    slot, text = request.slot, np.asarray(request.feed, np.int32)
    if request.session_id is not None:
      if not len(text):
        raise ValueError(f'slot {slot}: a new session needs at least one token')
      self._keys[slot] = sampling.session_key(self.config.seed, request.session_id)
      self._length[slot] = 0  # what the slot held before is masked from now on
    elif len(text):
      text = np.concatenate([self._current[slot:slot + 1], text])
    start = int(self._length[slot])
    if start + max(1, len(text)) + request.limit > self.max_len:
      raise ValueError(f'slot {slot} would outgrow its {self.max_len} cache entries')
    if len(text):
      self._current[slot] = text[-1]
      self._length[slot] += len(text) - 1
    return plan(slot, start, text[:-1], self.config.prefill_buckets)

  def _run_prefill(self, params: Any, items: list[PrefillItem]) -> dict[int, list[np.ndarray]]:
    """Runs the chunks, same width together, in order per slot; returns routing by slot."""
    pending, fed = [], {}
    for order, width in sorted({(item.order, item.width) for item in items}):
      group = sorted((item for item in items if (item.order, item.width) == (order, width)),
                     key=lambda item: item.start)  # the longest slot decides a chunk's view
      rows = self.config.prefill_tokens // width
      for first in range(0, len(group), rows):
        part = group[first:first + rows]
        view = self._view(np.asarray([item.start for item in part]))
        self._latent, routing = self._prefill(
            params, self._latent, *_pad(part, rows, width, self.slots), view=view)
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
    latent: Latent,
    tokens: Int[Array, 'R P'],
    counts: Int[Array, 'R'],
    slots: Int[Array, 'R'],
    lengths: Int[Array, 'R'],
    *,
    view: int,
) -> tuple[Latent, UInt16[Array, 'L R P K']]:
  """Appends tokens to R of the cache's rows.

  The rows are gathered into a small batch, and only the new entries are written back: most ticks
  feed few of the slots.

  Args:
    model_config: the model.
    params: its parameters.
    latent: cache entries of all slots.
    tokens: text, padded at the end.
    counts: valid tokens per row.
    slots: cache row of each row, distinct; an index past the last slot marks an unused row.
    lengths: tokens that each row's slot holds.
    view: attend over the first `view` cache entries; no row may hold more.

  Returns:
    The cache entries, and the chosen experts of every token (garbage at padding).
  """
  rows = gather(latent, slots, view)
  valid = jnp.arange(tokens.shape[1])[None] < counts[:, None]
  out = transformer.forward(
      model_config, params, tokens, segment_ids=valid.astype(jnp.int32),
      cache=cache_lib.Cache(rows, lengths), output='hidden')
  # All reading comes before all writing: otherwise XLA copies the cache of every slot.
  latent, new, experts = jax.lax.optimization_barrier(
      (latent, out.latents, out.router.indices.astype(jnp.uint16)))
  return scatter(latent, slots, lengths, counts, new), experts


def decode_chunk(
    model_config: ModelConfig,
    params: Any,
    latent: Latent,
    slots: Int[Array, 'R'] | None,
    lengths: Int[Array, 'R'],
    current: Int[Array, 'R'],
    keys: UInt32[Array, 'R 2'],
    limits: Int[Array, 'R'],
    temperature: Float[Array, ''] | float,
    *,
    end_id: int,
    steps: int,
    greedy: bool,
    view: int,
) -> tuple[Latent, tuple[
    Int[Array, 'S R'], Float[Array, 'S R'], UInt16[Array, 'S L R K'], Int[Array, 'R'],
    Bool[Array, 'R']]]:
  """Samples up to `limits` tokens per row, until each has ended, for at most `steps` steps.

  The loop reads the old entries and carries only the few that it adds: what a loop carries, XLA:CPU
  copies at every step.

  Args:
    model_config: the model.
    params: its parameters.
    latent: cache entries of all slots; they hold each sequence but its current token.
    slots: cache row of each row, distinct; an index past the last slot marks an unused row. None:
      row i is slot i, for all slots.
    lengths: tokens that each row's slot holds.
    current: the last token of each sequence.
    keys: random stream of each row.
    limits: most tokens to sample; 0 leaves the slot untouched.
    temperature: of the sampling, above 0.
    end_id: token that ends a turn.
    steps: size S of the outputs.
    greedy: take the arg-max.
    view: attend over the first `view` cache entries; no active row may hold more.

  Returns:
    The cache entries, and (tokens, log-probs, experts of the fed token, number of sampled tokens,
    ended).
  """
  rows = current.shape[0]
  layers = model_config.num_hidden_layers - model_config.first_k_dense_replace
  outputs = (jnp.zeros((steps, rows), jnp.int32), jnp.zeros((steps, rows), jnp.float32),
             jnp.zeros((steps, layers, rows, model_config.num_experts_per_tok), jnp.uint16))

  seen = cache_lib.Cache(gather(latent, slots, view), lengths)

  def wants_more(state):
    step, _, _, active, _, _ = state
    return (step < steps) & jnp.any(active)

  def body(state):
    step, added, current, active, ended, outputs = state
    out = transformer.forward(
        model_config, params, current[:, None], segment_ids=active[:, None].astype(jnp.int32),
        cache=(seen, added))
    positions = lengths + added.length + 1
    drawn, logprobs = sampling.sample(out.logits[:, 0], keys, positions, temperature, greedy)
    current = jnp.where(active, drawn, current)
    ended = ended | (active & (drawn == end_id))
    new = (drawn, logprobs, out.router.indices[:, :, 0].astype(jnp.uint16))
    outputs = jax.tree.map(lambda o, x: o.at[step].set(x), outputs, new)
    active = active & ~ended & (out.cache.length < limits)
    return step + 1, out.cache, current, active, ended, outputs

  empty = cache_lib.init_cache(model_config, rows, steps)
  state = (0, empty, current, limits > 0, jnp.zeros(rows, bool), outputs)
  _, added, _, _, ended, outputs = jax.lax.while_loop(wants_more, body, state)
  return (scatter(latent, slots, lengths, added.length, added.latent),
          (*outputs, added.length, ended))


def gather(latent: Latent, slots: Int[Array, 'R'] | None, view: int) -> Latent:
  """Returns the first `view` entries of some slots (None: of all).

  An index past the end reads the last slot.
  """
  if slots is None:
    return tuple(layer[:, :view] for layer in latent)
  return tuple(jnp.take(layer, slots, axis=0, mode='clip')[:, :view] for layer in latent)


def scatter(latent: Latent, slots: Int[Array, 'R'] | None, lengths: Int[Array, 'R'],
            counts: Int[Array, 'R'], new: Sequence[Float[Array, 'R P C']]) -> Latent:
  """Returns the cache with the first `counts` new entries of each row behind `lengths` others.

  Rows whose slot is past the end are written nowhere.
  """
  place = jnp.arange(new[0].shape[1])
  entries = jnp.where(place < counts[:, None], lengths[:, None] + place, latent[0].shape[1])
  slots = (jnp.arange(len(lengths)) if slots is None else slots)[:, None]
  return tuple(layer.at[slots, entries].set(fresh, mode='drop')
               for layer, fresh in zip(latent, new, strict=True))


# Compiled functions outlive an engine: a second one with the same shapes costs no compilation.
_prefill = jax.jit(prefill_chunk, static_argnames=('model_config', 'view'),
                   donate_argnames='latent')
_decode = jax.jit(decode_chunk, donate_argnames='latent',
                  static_argnames=('model_config', 'end_id', 'steps', 'greedy', 'view'))


def _pad(items: list[PrefillItem], rows: int, width: int, slots: int) -> tuple[np.ndarray, ...]:
  """Returns the arguments of `prefill_chunk` for up to `rows` items of one width."""
  tokens = np.zeros((rows, width), np.int32)
  counts = np.zeros(rows, np.int32)
  # Unused rows get distinct indices past the end: the scatter promises unique ones.
  where = np.arange(slots, slots + rows, dtype=np.int32)
  lengths = np.zeros(rows, np.int32)
  for row, item in enumerate(items):
    tokens[row, :len(item.tokens)] = item.tokens
    counts[row] = len(item.tokens)
    where[row] = item.slot
    lengths[row] = item.start
  return tokens, counts, where, lengths
