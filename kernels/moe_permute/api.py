"""`permute` and `combine`: tokens to rows sorted by expert, and back.

Every choice of an expert becomes a row; none is dropped, whatever the load. Both directions and
their gradients add up in a fixed order, so that equal inputs give equal bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from composer_jax.kernels import dispatch
from composer_jax.kernels.moe_permute import reference, xla

BACKENDS = (
    dispatch.Backend('xla', xla, xla.obstacle, ('cpu', 'gpu', 'tpu')),
    dispatch.Backend('reference', reference, reference.obstacle, ()),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
  """Where each choice of an expert goes; M = T K rows.

  Attributes:
    source: choice `t K + k` that lies at each row, -1 at the rows of padding, which come last.
    place: row of each choice, M for padding.
    group_sizes: rows of each expert.
  """

  source: Int[Array, 'M']
  place: Int[Array, 'T K']
  group_sizes: Int[Array, 'E']


def make_plan(experts: Int[Array, 'T K'], valid: Bool[Array, 'T'], groups: int) -> Plan:
  """Sorts choices by expert; those of one expert keep their order.

  Args:
    experts: the experts of each token, in [0, groups).
    valid: False for padding, which goes to no expert.
    groups: number of experts.

  Raises:
    ValueError: shapes or types that do not fit.
  """
  if experts.ndim != 2 or valid.shape != experts.shape[:1]:
    raise ValueError(f'moe_permute: experts [T, K] and valid [T] do not fit: {experts.shape}, '
                     f'{valid.shape}')
  if not jnp.issubdtype(experts.dtype, jnp.integer) or valid.dtype != jnp.bool_:
    raise ValueError(f'moe_permute: experts have to be integers and valid boolean, not '
                     f'{experts.dtype} and {valid.dtype}')
  rows = experts.size
  expert = jnp.where(valid[:, None], experts, groups).reshape(-1)
  order = jnp.argsort(expert, stable=True).astype(jnp.int32)
  group_sizes = (expert[:, None] == jnp.arange(groups)).sum(axis=0, dtype=jnp.int32)
  used = jnp.arange(rows) < group_sizes.sum()
  place = jnp.zeros(rows, jnp.int32).at[order].set(jnp.arange(rows, dtype=jnp.int32),
                                                    unique_indices=True)
  place = jnp.where(expert < groups, place, rows)
  return Plan(jnp.where(used, order, -1), place.reshape(experts.shape), group_sizes)


def permute(x: Float[Array, 'T D'], plan: Plan, *, impl: str = 'auto') -> Float[Array, 'M D']:
  """Returns the rows of the plan, zeros for padding.

  Args:
    x: tokens.
    plan: from `make_plan`.
    impl: "auto", "xla" or "reference". A named one never falls back.

  Raises:
    ValueError: shapes that do not fit, or a backend that cannot run here.
  """
  if x.ndim != 2 or x.shape[0] != plan.place.shape[0]:
    raise ValueError(f'moe_permute: x [T, D] does not fit a plan of {plan.place.shape[0]} tokens: '
                     f'{x.shape}')
  return _permute(dispatch.choose('moe_permute', BACKENDS, impl).name, x, plan.source, plan.place)


def combine(rows: Float[Array, 'M D'], plan: Plan, weights: Float[Array, 'T K'], *,
            impl: str = 'auto') -> Float[Array, 'T D']:
  """Returns the weighted sum of each token's rows, in the type of `rows`; zeros for padding.

  Args:
    rows: of the plan.
    plan: from `make_plan`.
    weights: of each choice.
    impl: "auto", "xla" or "reference". A named one never falls back.

  Raises:
    ValueError: shapes that do not fit, or a backend that cannot run here.
  """
  if rows.ndim != 2 or rows.shape[0] != plan.source.shape[0] or weights.shape != plan.place.shape:
    raise ValueError(f'moe_permute: rows [M, D] and weights [T, K] do not fit a plan of '
                     f'{plan.source.shape[0]} rows and {plan.place.shape} choices: {rows.shape}, '
                     f'{weights.shape}')
  impl = dispatch.choose('moe_permute', BACKENDS, impl).name
  return _combine(impl, rows, plan.source, plan.place, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(impl, x, source, place):
  return _functions(impl).permute(x, source, place)


def _permute_forward(impl, x, source, place):
  return _permute(impl, x, source, place), place


def _permute_backward(impl, place, d_rows):
  ones = jnp.ones(place.shape, d_rows.dtype)
  return _functions(impl).combine(d_rows, place, ones).astype(d_rows.dtype), None, None


_permute.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(impl, rows, source, place, weights):
  return _functions(impl).combine(rows, place, weights).astype(rows.dtype)


def _combine_forward(impl, rows, source, place, weights):
  return _combine(impl, rows, source, place, weights), (rows, source, place, weights)


def _combine_backward(impl, residual, dy):
  rows, source, place, weights = residual
  d_rows = _functions(impl).spread(dy, source, weights).astype(rows.dtype)
  d_weights = _functions(impl).dots(rows, place, dy).astype(weights.dtype)
  # Weights of padding are multiplied with zeros.
  return d_rows, None, None, d_weights


_combine.defvjp(_combine_forward, _combine_backward)


def _functions(impl):
  return next(b.functions for b in BACKENDS if b.name == impl)
