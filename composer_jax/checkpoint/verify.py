"""Compares two checkpoints of one shape: every tensor, and the logits on fixed tokens."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import models
from composer_jax.checkpoint import block_fp8, hf_import, names, packed_int4
from composer_jax.checkpoint.hf_export import Reader
from composer_jax.checkpoint.hf_source import Advance
from composer_jax.errors import UserError

# Half a unit in the last place, over the value. A weight that is stored in a coarser format may be
# off by that much, and by nothing else.
_HALF_ULP = {'float32': 2.0**-24, 'float16': 2.0**-11, 'bfloat16': 2.0**-8, 'fp8': 2.0**-4}
_SUBNORMAL = {'float32': 2.0**-150, 'float16': 2.0**-25, 'bfloat16': 2.0**-134}  # half a step
# Of quantised weights: how far all of a tensor may shrink or grow together. Rounding errors do not
# add up so; saturation of each INT4 group's largest weight (7.5 steps to 7) takes a percent.
_LARGEST_GAIN = {'fp8': 0.01, 'int4': 0.03}
# Largest difference of a position's logits over the largest logit, in the median of the positions,
# by the coarsest format among the tensors that differ (where none does, no logit may differ).
# Quantised weights are another model: shown, not judged.
LOGIT_TOLERANCE = {'float32': 1e-4, 'float16': 1e-2, 'bfloat16': 5e-2}
_COARSE = ('float32', 'float16', 'bfloat16', 'fp8', 'int4')
_ROWS, _LENGTH = 2, 64


@dataclasses.dataclass(frozen=True)
class TensorResult:
  """How one tensor compares.

  Attributes:
    name: of the tensor.
    formats: what it is stored as on both sides.
    equal: the values are equal bit for bit.
    max_abs: largest difference.
    max_rel: that over the largest value of either side.
    ok: equal, or stored in two formats and no further apart than rounding to them explains.
  """

  name: str
  formats: tuple[str, str]
  equal: bool
  max_abs: float
  max_rel: float
  ok: bool


def compare_tensors(first: Reader, second: Reader, advance: Advance = lambda size: None
                    ) -> list[TensorResult]:
  """Compares every tensor, decoded, one at a time.

  Raises:
    UserError: the two have different shapes.
  """
  check_same_shape(first, second)
  results = []
  for entry in names.table(first.config):
    if not entry.copy:
      results.append(_compare(entry, first, second))
      advance(1)
  return results


def check_same_shape(first: Reader, second: Reader) -> None:
  """Raises UserError that names the first field in which two configs differ."""
  name = first.config.different_function(second.config)
  if name:
    ours, theirs = getattr(first.config, name), getattr(second.config, name)
    raise UserError(f'the two are different models: {name} is {ours} and {theirs}')


def compare_logits(first: Reader, second: Reader) -> dict[str, float]:
  """Returns how far the logits of the two are apart on fixed random tokens, in float32.

  Returns:
    `max_rel` (largest difference over the largest logit of either), `median_rel` (the median over
    positions of the same: where an expert was chosen by a hair, a rounded weight may choose
    another, which moves some positions far), `argmax_agreement` (share
    of positions), `kl_nats` (mean divergence of the second from the first), `tokens`.

  Raises:
    UserError: logits are not finite.
  """
  config = first.config
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, (_ROWS, _LENGTH)).astype(np.int32)
  run = jax.jit(lambda params: models.forward(config, params, tokens).logits)
  one, other = (run(hf_import.load(side, dtype='float32')) for side in (first, second))
  largest = float(jnp.maximum(jnp.abs(one).max(), jnp.abs(other).max()))
  if not np.isfinite(largest):
    raise UserError('the logits are not finite: the weights are too large for float32')
  log_one, log_other = jax.nn.log_softmax(one), jax.nn.log_softmax(other)
  divergence = (jnp.exp(log_one) * (log_one - log_other)).sum(-1).mean()
  apart = jnp.abs(one - other).max(axis=-1)
  return {'max_rel': _over(float(apart.max()), largest),
          'median_rel': _over(float(jnp.median(apart)), largest),
          'argmax_agreement': float((one.argmax(-1) == other.argmax(-1)).mean()),
          'kl_nats': float(divergence), 'tokens': tokens.size}


def logit_tolerance(results: list[TensorResult]) -> tuple[str, float | None]:
  """Returns the coarsest format among the tensors that differ, and what it allows the logits.

  Returns:
    "equal" and 0 when no tensor differs; None where a difference cannot be judged.
  """
  changed = [_coarser(result.formats) for result in results if not result.equal]
  if not changed:
    return 'equal', 0.0
  coarse = max(changed, key=_COARSE.index)
  return coarse, LOGIT_TOLERANCE.get(coarse)


def by_kind(results: list[TensorResult]) -> list[dict[str, Any]]:
  """Returns a row for each kind of tensor (numbers in names become `*`), the worst first."""
  rows: dict[str, dict[str, Any]] = {}
  for result in results:
    kind = re.sub(r'\.\d+\.', '.*.', result.name)
    row = rows.setdefault(kind, {'kind': kind, 'formats': '/'.join(result.formats), 'count': 0,
                                 'bit_equal': 0, 'max_abs': 0.0, 'max_rel': 0.0, 'ok': True})
    row['count'] += 1
    row['bit_equal'] += result.equal
    row['ok'] &= result.ok
    for key in ('max_abs', 'max_rel'):
      row[key] = max(row[key], getattr(result, key))
  return sorted(rows.values(), key=lambda row: (row['ok'], -row['max_rel']))


def _compare(entry: names.Entry, first: Reader, second: Reader) -> TensorResult:
  sides = first, second
  one, other = (entry.to_hf(side.read(entry.leaf, entry.place)).astype(np.float32)
                for side in sides)
  formats = first.format(entry), second.format(entry)
  difference = np.abs(one - other)
  largest = float(max(np.abs(one).max(), np.abs(other).max()))
  equal = one.tobytes() == other.tobytes()
  ok = equal or formats[0] != formats[1] and bool(
      (difference <= _rounding(entry, sides, np.maximum(np.abs(one), np.abs(other)))).all()
      and _gain(one, other) <= _LARGEST_GAIN.get(_coarser(formats), np.inf))
  return TensorResult(entry.key, formats, equal, float(difference.max()),
                      _over(float(difference.max()), largest), ok)


def _rounding(entry: names.Entry, sides: tuple[Reader, Reader], size: np.ndarray) -> np.ndarray:
  """Returns how far weights `[out, in]` may be apart that were rounded to both sides' formats."""
  formats = {side.format(entry): side for side in sides}
  # A quantised weight is read as bfloat16.
  plain = {'bfloat16' if name in ('fp8', 'int4') else name for name in formats}
  bound = sum(_HALF_ULP[name] * size + _SUBNORMAL[name] for name in sorted(plain))
  if 'int4' in formats:  # half a step; 7.5 saturates to 7, and scales are rounded to bfloat16
    scale = np.abs(formats['int4'].scale(entry).astype(np.float32))
    bound += np.repeat(scale * (0.5 + 8 * _HALF_ULP['bfloat16']), packed_int4.GROUP, axis=-1)
  if 'fp8' in formats:  # half a unit in the last place, half a step of subnormal codes
    scale = np.abs(formats['fp8'].scale(entry))
    for axis, length in enumerate(size.shape):
      scale = np.repeat(scale, block_fp8.BLOCK, axis=axis).take(range(length), axis=axis)
    bound += np.maximum(_HALF_ULP['fp8'] * size, scale * 2.0**-10)
  return bound


def _gain(one: np.ndarray, other: np.ndarray) -> float:
  """Returns how far the best factor between the two is from 1."""
  energy = np.vdot(one, one)
  return abs(float(np.vdot(one, other) / energy) - 1) if energy else 0.0


def _over(difference: float, largest: float) -> float:
  return difference / largest if largest else 0.0


def _coarser(formats: tuple[str, str]) -> str:
  return max(formats, key=_COARSE.index)
