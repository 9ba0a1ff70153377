"""Compares two checkpoints of one shape: every tensor, and the logits on fixed tokens."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import models
from composer_jax.checkpoint import hf_import, names
from composer_jax.checkpoint.hf_export import Reader
from composer_jax.checkpoint.hf_source import Advance
from composer_jax.errors import UserError

# Largest difference of a weight over the largest weight of the tensor, by the coarser of the two
# formats: half a unit in the last place of the largest value, and what bfloat16 adds to it.
TENSOR_TOLERANCE = {'float32': 0.0, 'float16': 2.0**-11, 'bfloat16': 2.0**-8,
                    'fp8': 2.0**-4 + 2.0**-8, 'int4': 1 / 14 + 2.0**-7}
# Largest difference of a logit over the largest logit. Quantised weights are another model: shown,
# not judged.
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
    max_rel: that over the largest value of the first side.
    ok: within the tolerance of the coarser format.
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
    if entry.copy:
      continue
    values = [side.read(entry.leaf, entry.place).astype(np.float32) for side in (first, second)]
    results.append(_compare(entry, first, second, *values))
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
    `max_rel` (largest difference over the largest logit of the first), `argmax_agreement` (share
    of positions), `kl_nats` (mean divergence of the second from the first), `tokens`.
  """
  config = first.config
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, (_ROWS, _LENGTH)).astype(np.int32)
  run = jax.jit(lambda params: models.forward(config, params, tokens).logits)
  one, other = (run(hf_import.load(side, dtype='float32')) for side in (first, second))
  largest = jnp.abs(one).max()
  log_one, log_other = jax.nn.log_softmax(one), jax.nn.log_softmax(other)
  divergence = (jnp.exp(log_one) * (log_one - log_other)).sum(-1).mean()
  return {'max_rel': float(jnp.abs(one - other).max() / largest),
          'argmax_agreement': float((one.argmax(-1) == other.argmax(-1)).mean()),
          'kl_nats': float(divergence), 'tokens': tokens.size}


def coarsest(results: list[TensorResult]) -> str:
  """Returns the coarsest format among all tensors of both sides."""
  return max((_coarser(result.formats) for result in results), key=_COARSE.index)


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


def _compare(entry: names.Entry, first: Reader, second: Reader, one: np.ndarray,
             other: np.ndarray) -> TensorResult:
  formats = first.format(entry), second.format(entry)
  difference = float(np.abs(one - other).max()) if one.size else 0.0
  largest = float(np.abs(one).max()) if one.size else 0.0
  relative = difference / largest if largest else (0.0 if difference == 0 else np.inf)
  equal = one.tobytes() == other.tobytes()
  tolerance = 0.0 if formats[0] == formats[1] else TENSOR_TOLERANCE[_coarser(formats)]
  return TensorResult(entry.key, formats, equal, difference, relative,
                      equal or relative <= tolerance)


def _coarser(formats: tuple[str, str]) -> str:
  return max(formats, key=_COARSE.index)
