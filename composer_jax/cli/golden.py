"""Log-probs of a fixed text under a run's parameters: two paths compared, and kept for later."""

import dataclasses
from pathlib import Path
from typing import Any

from composer_jax.recipe.workdir import read_json, write_json

TEXT = '''def clamp(value, low, high):
  """Keeps value between low and high."""
  return max(low, min(value, high))
'''
GOLDEN_FILE = 'golden.json'
# Our choice. Both paths run in float32 on one machine; another machine sums in another order.
PATHS_TOLERANCE = 1e-4
GOLDEN_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Check:
  """Result of the self-check, in nats.

  Attributes:
    tokens: number of tokens of the text.
    paths_gap: largest difference between the training forward pass and prefill + decode.
    golden_gap: largest difference from the log-probs kept in the run folder; None when they were
      written just now.
  """

  tokens: int
  paths_gap: float
  golden_gap: float | None

  @property
  def ok(self) -> bool:
    """Whether both differences are small."""
    return self.paths_gap < PATHS_TOLERANCE and (self.golden_gap or 0.0) < GOLDEN_TOLERANCE


def check(workdir: Path) -> Check:
  """Computes the log-probs of `TEXT` in two ways and compares them with the run's golden file.

  The golden file is written when the run has none.

  Args:
    workdir: a run folder that has parameters.
  """
  import numpy as np

  from composer_jax import api
  model = api.load(str(workdir), dtype='float32')
  tokens = np.asarray(model.tokenizer.encode(TEXT), np.int32)
  full, cached = _full(model, tokens), _cached(model, tokens)
  path = workdir / GOLDEN_FILE
  golden_gap = None
  if path.exists():
    golden = read_json(path)
    same = golden['tokens'] == tokens.tolist()
    golden_gap = float(np.abs(full - golden['logprobs']).max()) if same else float('inf')
  else:
    write_json(path, {'tokens': tokens.tolist(), 'logprobs': full.tolist()})
  return Check(len(tokens), float(np.abs(full - cached).max()), golden_gap)


def _full(model: Any, tokens: Any) -> Any:
  """Log-prob of tokens[1:], float64 [S-1], from one forward pass."""
  out = model.forward(model.params, tokens[None])
  return _pick(out.logits[0, :-1], tokens[1:])


def _cached(model: Any, tokens: Any) -> Any:
  """The same from a prefill of the first half and one decode step for each token after it."""
  import jax
  import jax.numpy as jnp

  from composer_jax import models

  @jax.jit
  def step(params, part, cache):
    out = models.forward(model.config, params, part, cache=cache)
    return out.logits[0], out.cache

  half = len(tokens) // 2
  cache = models.init_cache(model.config, 1, len(tokens))
  rows = []
  for start, end in [(0, half), *((i, i + 1) for i in range(half, len(tokens) - 1))]:
    logits, cache = step(model.params, tokens[None, start:end], cache)
    rows.append(logits)
  return _pick(jnp.concatenate(rows), tokens[1:])


def _pick(logits: Any, targets: Any) -> Any:
  import numpy as np
  logits = np.asarray(logits, np.float64)
  top = logits.max(-1, keepdims=True)
  normaliser = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
  return logits[np.arange(len(targets)), targets] - normaliser
