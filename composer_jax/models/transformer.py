"""The whole model as pure functions of a nested dict of parameters: `init`, `forward`, `head`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from composer_jax.models import cache as cache_lib
from composer_jax.models import config as config_lib
from composer_jax.models import layers, precision
from composer_jax.models import mtp as mtp_lib
from composer_jax.models import router as router_lib
from composer_jax.models.block import Block, DenseBlock, make_context

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOut:
  """Result of `forward`.

  Attributes:
    hidden: residual stream after the final norm; `head(hidden)` gives logits.
    router: what the routers did.
    logits: next-token logits, None when `output="hidden"`.
    cache: the cache (of several pieces, the last) with the new tokens, None without one.
    latents: the new tokens' cache entries of each layer, for a caller that stores them itself.
    mtp_hidden: normalised output of the MTP layer at t, about token t + 2; None when not asked for.
    mtp_logits: its logits through the shared head, None as `logits`.
    mtp_mask: where the MTP layer has an input, i.e. t + 1 is in the same document as t.
  """

  hidden: Float[Array, 'B S D']
  router: router_lib.RouterOut
  logits: Float[Array, 'B S V'] | None = None
  cache: cache_lib.Cache | None = None
  latents: tuple[Float[Array, 'B S C+R'], ...] | None = None
  mtp_hidden: Float[Array, 'B S D'] | None = None
  mtp_logits: Float[Array, 'B S V'] | None = None
  mtp_mask: Bool[Array, 'B S'] | None = None


class _Ends(nnx.Module):
  """What lies outside the layer stacks."""

  def __init__(self, config: config_lib.ModelConfig):
    v, d = config.vocab_size, config.hidden_size
    self.embed = layers.matrix(config, (v, d), ('vocab', 'embed'))
    self.norm = layers.scale(d)
    if not config.tie_word_embeddings:
      self.head = layers.matrix(config, (d, v), ('embed', 'vocab'))


def _stacks(config: config_lib.ModelConfig) -> dict[str, tuple[type[Block], int]]:
  """Returns name -> (block class, layers) of the stacks that the config has, in order."""
  stacks = {'dense_layers': (DenseBlock, config.first_k_dense_replace),
            'moe_layers': (Block, config.num_moe_layers)}
  return {name: entry for name, entry in stacks.items() if entry[1]}


@functools.partial(jax.jit, static_argnums=0)
def init(config: config_lib.ModelConfig, key: jax.Array) -> Params:
  """Returns initial parameters, float32.

  Args:
    config: the model's shape.
    key: a JAX random key.

  Returns:
    `embed [V, D]`, `norm [D]`, `head [D, V]` (unless tied), `dense_layers` and `moe_layers` with a
    leading layer axis on every leaf, and `mtp` when the config has one. Under `jax.eval_shape` no
    memory is used, whatever the size.
  """
  ends_key, mtp_key, *stack_keys = jax.random.split(key, 2 + len(_stacks(config)))
  params = layers.initial(_Ends, config, ends_key)
  for (name, (cls, count)), stack_key in zip(_stacks(config).items(), stack_keys, strict=True):
    params[name] = layers.initial(cls, config, stack_key, count)
  if config.num_nextn_predict_layers:
    params['mtp'] = layers.initial(mtp_lib.Mtp, config, mtp_key)
  return params


def logical_axes(config: config_lib.ModelConfig) -> Params:
  """Returns the `sharding.rules.Axes` of every parameter, a tree like that of `init`."""
  tree = layers.axes(_Ends, config)
  for name, (cls, _) in _stacks(config).items():
    tree[name] = layers.axes(cls, config, lead=('layer',))
  if config.num_nextn_predict_layers:
    tree['mtp'] = layers.axes(mtp_lib.Mtp, config)
  return tree


def head(config: config_lib.ModelConfig, params: Params, hidden: Float[Array, '... D']
         ) -> Float[Array, '... V']:
  """Returns logits in float32 of normalised hidden states."""
  return layers.linear(hidden, head_weight(config, params), config.precision.head).astype(
      jnp.float32)


def head_weight(config: config_lib.ModelConfig, params: Params) -> Float[Array, 'D V']:
  """Returns the matrix of the output head."""
  return params['embed'].T if config.tie_word_embeddings else params['head']


def forward(config: config_lib.ModelConfig, params: Params, tokens: Int[Array, 'B S'], *,
            positions: Int[Array, 'B S'] | None = None,
            segment_ids: Int[Array, 'B S'] | None = None,
            cache: cache_lib.Cache | Sequence[cache_lib.Cache] | None = None,
            routing: router_lib.Routing | None = None,
            document_weights: Float[Array, 'B S'] | None = None, output: str = 'logits',
            mtp: bool = False) -> ForwardOut:
  """Runs the model, for training and, with a cache, for generation.

  Args:
    config: the model's shape.
    params: from `init`.
    tokens: token ids.
    positions: rotary positions; default 0, 1, ... in each row, counted from the slot's length with
      a cache.
    segment_ids: packed documents 1, 2, ... of each row, 0 for padding; default all 1. Documents do
      not see each other. With a cache, padding is neither written nor counted in the slot's length;
      earlier entries belong to the same document, unless the cache was made `packed`.
    cache: slots to append to; row n belongs to slot n. Prefill (S > 1) and decoding (S = 1) are the
      same code. Several caches are pieces of the same sequences, each going on where the one before
      ends; only the last is appended to.
    routing: expert choices to replay.
    document_weights: also return the routers' losses, in which each document counts with the weight
      that its tokens have here (the same for all of them; see `router.Sequences`).
    output: "logits", or "hidden" to leave the head to the caller.
    mtp: also run the MTP layer (not with a cache).

  Returns:
    See `ForwardOut`. Rows of padding hold finite numbers without meaning.

  Raises:
    ValueError: arguments that exclude each other or do not fit the config.
  """
  caches = cache_lib.pieces(cache)
  _check(config, tokens, caches, routing, output, mtp)
  segment_ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
  valid = segment_ids != 0
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if caches:
      positions = jnp.maximum(cache_lib.places(sum(c.length for c in caches), valid), 0)
  context = make_context(config, positions, segment_ids, caches, document_weights)
  x = precision.embed(config.precision.embeddings, params['embed'], tokens)
  x, new, choices = _run_stacks(config, params, x, context, caches, routing)
  hidden = layers.rms_norm(x, params['norm'], config.rms_norm_eps)
  mtp_hidden, mtp_mask = None, None
  if mtp:
    mtp_hidden, mtp_mask, choice = mtp_lib.over_sequence(
        config, params, hidden, tokens, segment_ids, context)
    for name, last in ({'counts': choice.counts} | (choice.losses or {})).items():
      choices[name] = jnp.concatenate([choices[name], last[None]])
  router = router_lib.RouterOut(**choices)
  with_head = output == 'logits'
  return ForwardOut(
      hidden=hidden, router=router,
      logits=head(config, params, hidden) if with_head else None,
      cache=cache_lib.append(caches[-1], new, segment_ids) if caches else None, latents=new,
      mtp_hidden=mtp_hidden, mtp_mask=mtp_mask,
      mtp_logits=head(config, params, mtp_hidden) if with_head and mtp else None)


def _check(config, tokens, caches, routing, output, mtp) -> None:
  if output not in ('logits', 'hidden'):
    raise ValueError(f'output must be "logits" or "hidden", got {output!r}')
  if mtp and not config.num_nextn_predict_layers:
    raise ValueError('mtp asked for, but the config has num_nextn_predict_layers 0')
  if mtp and caches:
    raise ValueError('the MTP layer does not run with a cache')
  for cache in caches:
    if cache.length.shape[0] != tokens.shape[0]:
      raise ValueError(f'{tokens.shape[0]} rows for a cache of {cache.length.shape[0]} slots')
  if routing is None:
    return
  wanted = (config.num_moe_layers, *tokens.shape, config.num_experts_per_tok)
  if routing.indices.shape != wanted:
    raise ValueError(f'routing of shape {routing.indices.shape}, expected {wanted} '
                     '(MoE layers only, dense ones have no record)')
  if routing.indices.dtype.itemsize * 8 < 16 and config.n_routed_experts > 127:
    raise ValueError(f'routing ids in {routing.indices.dtype} cannot name '
                     f'{config.n_routed_experts} experts')


def _run_stacks(config, params, x, context, caches, routing):
  """Runs the dense, then the MoE layers; returns the stream, new latents and stacked choices."""
  rows, k = x.shape[0] * x.shape[1], config.num_experts_per_tok
  cached, news = zip(*(c.latent for c in caches), strict=True), []  # a layer's pieces at a time
  choices = {'indices': jnp.zeros((0, *x.shape[:2], k), jnp.int32),
             'counts': jnp.zeros((0, config.n_routed_experts), jnp.int32),
             'replaced': jnp.zeros((0,), jnp.int32)}
  if context.sequences is not None:
    choices |= {name: jnp.zeros((0,), jnp.float32) for name in router_lib.LOSSES}
  for name, (cls, count) in _stacks(config).items():
    xs = {'params': params[name]}
    if routing is not None and cls is Block:
      xs['recorded'] = routing.indices.reshape(count, rows, k)

    def body(x, layer, cls=cls):
      replay = None
      if 'recorded' in layer:
        replay = {'recorded': layer['recorded'], 'mask': routing.mask.reshape(-1),
                  'slack': routing.slack}
      block = layers.bind(cls, config, layer['params'])
      x, new, choice = block(x, context, layer.get('cached', ()), replay)
      kept = None if choice is None else {
          'indices': choice.indices.reshape(*x.shape[:2], k), 'counts': choice.counts,
          'replaced': choice.replaced} | (choice.losses or {})
      return x, (new if caches else None, kept)

    if not caches:
      if config.remat == 'full':
        body = jax.checkpoint(body)
      x, (_, kept) = jax.lax.scan(body, x, xs, unroll=min(config.scan_unroll, count))
    else:
      each = []
      for index in range(count):  # not a scan: it would copy every layer's cache
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], xs)
        x, (new, kept) = body(x, layer | {'cached': next(cached)})
        news.append(new)
        each.append(kept)
      kept = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    choices = choices if kept is None else kept
  return x, tuple(news) if caches else None, choices
