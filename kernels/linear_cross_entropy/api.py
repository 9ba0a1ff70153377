"""`linear_cross_entropy`: the loss of every token straight from the last hidden states.

    logits = hidden @ w;  nll = logsumexp(logits) - logits[target]

with its gradient, and never `[T, V]` at once: for 262144 tokens of Kimi K2.5 that would be 172 GB.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels.linear_cross_entropy import reference, xla
from composer_jax.kernels.quantize.types import FLOAT32, Formats

BACKENDS = (
    dispatch.Backend('xla', xla, xla.obstacle, ('cpu', 'gpu', 'tpu')),
    dispatch.Backend('reference', reference, reference.obstacle, ()),
)
_LEAST_COLUMNS = 128  # also keeps blocks of 32 along the classes whole


def linear_cross_entropy(
    hidden: Float[Array, 'T D'], w: Float[Array, 'D V'], targets: Int[Array, 'T'],
    mask: Bool[Array, 'T'], *, formats: Formats = FLOAT32, chunk_bytes: int = 2 ** 28,
    impl: str = 'auto') -> tuple[Float[Array, 'T'], Float[Array, 'T']]:
  """Returns -log softmax(hidden @ w)[target] and log sum exp(hidden @ w), in nats, float32.

  Where the mask is False both are log V and no gradient flows, whatever `hidden` holds there. A
  target outside [0, V) gives NaN where the mask is True.

  Args:
    hidden: last hidden states, normalised.
    w: output head.
    targets: class of each token.
    mask: which tokens count.
    formats: what the operands of the three products are rounded to.
    chunk_bytes: size of the logits, in float32, that are held at once; our choice. A few such
      arrays live at a time, and no fewer than 128 classes are taken.
    impl: "auto", "xla" or "reference". A named one never falls back.

  Raises:
    ValueError: shapes or types that do not fit, targets (where they are known) outside [0, V) on
      tokens that count, or formats that a chunk cannot be rounded to on its own.
  """
  if (hidden.ndim != 2 or w.ndim != 2 or hidden.shape[1] != w.shape[0]
      or not hidden.shape[:1] == targets.shape == mask.shape):
    raise ValueError(f'linear_cross_entropy: hidden [T, D], w [D, V], targets [T] and mask [T] do '
                     f'not fit: {hidden.shape}, {w.shape}, {targets.shape}, {mask.shape}')
  for name, array, kind in (('hidden', hidden, jnp.floating), ('w', w, jnp.floating),
                            ('targets', targets, jnp.integer), ('mask', mask, jnp.bool_)):
    if not jnp.issubdtype(array.dtype, kind):
      raise ValueError(f'linear_cross_entropy: {name} cannot be {array.dtype}')
  if formats.dgrad == 'nvfp4':
    raise ValueError('linear_cross_entropy: dgrad cannot be "nvfp4", whose scale spans all classes')
  _check_targets(targets, mask, w.shape[1])
  columns = max(chunk_bytes // (4 * max(hidden.shape[0], 1)) // _LEAST_COLUMNS, 1) * _LEAST_COLUMNS
  backend = dispatch.choose('linear_cross_entropy', BACKENDS, impl)
  # What does not count is replaced before the op: NaN there can reach neither value nor gradient.
  hidden = jnp.where(mask[:, None], hidden, jnp.zeros((), hidden.dtype))
  logit, lse = _logit_and_lse(backend.name, formats, min(columns, w.shape[1]), hidden, w, targets)
  known = (targets >= 0) & (targets < w.shape[1])
  nll = jnp.where(known, lse - logit, jnp.nan)
  most = jnp.log(jnp.float32(w.shape[1]))
  return jnp.where(mask, nll, most), jnp.where(mask, lse, most)


def _check_targets(targets, mask, classes) -> None:
  if isinstance(targets, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
    return
  counted = np.asarray(targets)[np.asarray(mask)]
  if counted.size and (counted.min() < 0 or counted.max() >= classes):
    raise ValueError(f'linear_cross_entropy: targets from {counted.min()} to {counted.max()} for '
                     f'{classes} classes')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _logit_and_lse(impl, formats, columns, hidden, w, targets):
  return _functions(impl).forward(hidden, w, targets, formats, columns)


def _forward(impl, formats, columns, hidden, w, targets):
  logit, lse = _logit_and_lse(impl, formats, columns, hidden, w, targets)
  return (logit, lse), (hidden, w, targets, lse)


def _backward(impl, formats, columns, residual, gradients):
  hidden, w, targets, lse = residual
  d_hidden, d_w = _functions(impl).backward(hidden, w, targets, lse, *gradients, formats, columns)
  return d_hidden.astype(hidden.dtype), d_w.astype(w.dtype), None


_logit_and_lse.defvjp(_forward, _backward)


def _functions(impl):
  return next(b.functions for b in BACKENDS if b.name == impl)
