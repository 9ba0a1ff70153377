"""Log-probs of fixed prompts under a run's first parameters, kept in the run folder.

A library, a device or a damaged file that changes the numbers is noticed when the run is continued,
before anything is built on them.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from composer_jax import models
from composer_jax.config import build
from composer_jax.errors import NumericsError
from composer_jax.files import read_json
from composer_jax.models.config import ModelConfig
from composer_jax.recipe import versions
from composer_jax.recipe.schema import TRAINING_STAGES
from composer_jax.recipe.stages import Context
from composer_jax.recipe.workdir import write_json

GOLDEN_FILE = 'golden.json'
# Our choice. Both paths run in float32 on one machine; another machine sums in another order.
PATHS_TOLERANCE = 1e-4
GOLDEN_TOLERANCE = 1e-3
PROMPTS = (
  'def clamp(value, low, high):\n  return max(low, min(value, high))\n',
  'class Stack:\n  def __init__(self):\n    self._items = []\n',
  'import os\nfrom collections.abc import Mapping, Sequence\n',
  'for i in range(10):\n  if i % 3 == 0:\n    continue\n  print(i)\n',
  'total = sum(x * x for x in numbers if x > 0)\n',
  'with open(path, encoding="utf-8") as file:\n  lines = file.read().splitlines()\n',
  'try:\n  value = int(text)\nexcept ValueError as error:\n  raise KeyError(text) from error\n',
  '"""Returns the mean of the values, or 0 when there are none."""\n',
  '# The order matters here: the last writer wins.\n',
  'read_file main.py',
  'edit_file 2|  return max(low, min(value, high))',
  'fail clamp(5, 0, 3) got 0 want 3',
  'The quick brown fox jumps over the lazy dog, twice a day.',
  '{"name": "tiny", "sizes": [96, 288, 48], "tied": false, "rate": 3e-3}\n',
  '3.14159 + 2.71828 = 5.85987; 0x7f << 2 == 508\n',
  'größer → 大きい, naïve café ∑x² ≤ ∞\n',
)
_LENGTH = 48  # tokens of a prompt; longer ones are cut, so that there is one shape to compile


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text as the model sees it.

  Attributes:
    text: the text.
    tokens: its ids, at most `_LENGTH`.
    logprobs: natural log-prob of each token but the first, given those before it.
  """

  text: str
  tokens: list[int]
  logprobs: list[float]

  def __post_init__(self):
    if len(self.logprobs) != len(self.tokens) - 1:
      raise ValueError('needs one log-prob for every token but the first')


@dataclasses.dataclass(frozen=True)
class Golden:
  """The content of the golden file.

  Attributes:
    stage: whose final parameters were asked.
    versions: of the packages, and the kind of device, that gave the numbers.
    prompts: one for each of `PROMPTS`.
  """

  stage: str
  versions: dict[str, str]
  prompts: list[Prompt]

  def __post_init__(self):
    if len(self.prompts) != len(PROMPTS):
      raise ValueError(f'holds {len(self.prompts)} prompts, not {len(PROMPTS)}')
    if self.stage not in TRAINING_STAGES:
      raise ValueError(f'stage {self.stage!r} leaves no parameters')


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What the golden file says beside what this machine computes now.

  Attributes:
    stage: whose final parameters were asked.
    gap: largest difference of a log-prob in nats; infinite when the texts have other tokens now.
    then: versions and device of the golden file.
    now: versions and device of this process.
  """

  stage: str
  gap: float
  then: dict[str, str]
  now: dict[str, str]

  @property
  def ok(self) -> bool:
    """Whether the difference is rounding."""
    return self.gap < GOLDEN_TOLERANCE

  @property
  def text(self) -> str:
    """The difference and what has changed since, in one line."""
    what = 'the golden prompts have other tokens now'
    if not math.isinf(self.gap):
      what = (f'log-probs under the parameters of {self.stage} differ by {self.gap:.1e} nats from '
              'the kept ones')
    changed = [f'{name} was {self.then.get(name, "absent")} and is {self.now.get(name, "absent")}'
               for name in sorted(self.then | self.now)
               if self.then.get(name) != self.now.get(name)]
    return f'{what}; {", ".join(changed) or "versions and device are the same"}'


def keep(context: Context) -> None:
  """Writes the golden file from the first stage with parameters, if it can and is not there yet."""
  path = context.workdir / GOLDEN_FILE
  finished = (s for s in TRAINING_STAGES if (context.folder(s) / 'summary.json').exists())
  stage = next(finished, None)
  if stage is not None and not path.exists():
    write_json(path, Golden(stage, _versions(), _measure(context, stage, PROMPTS)))


def adopt(source: pathlib.Path, target: pathlib.Path, stage: str) -> None:
  """Takes over the golden file of a run when the stage that it speaks of has been copied."""
  path = source / GOLDEN_FILE
  if path.exists() and not (target / GOLDEN_FILE).exists():
    kept = read_json(path, 'stage')
    if kept['stage'] == stage:
      write_json(target / GOLDEN_FILE, kept)


def compare(context: Context) -> Comparison | None:
  """Computes again what the golden file holds.

  Returns:
    None when there is no golden file, or its stage has not finished.

  Raises:
    UserError: the golden file is damaged.
  """
  path = context.workdir / GOLDEN_FILE
  if not path.exists():
    return None
  golden = build(Golden, read_json(path), str(path))
  if not (context.folder(golden.stage) / 'summary.json').exists():
    return None
  fresh = _measure(context, golden.stage, [prompt.text for prompt in golden.prompts])
  gaps = [_gap(old, new) for old, new in zip(golden.prompts, fresh, strict=True)]
  return Comparison(golden.stage, float(np.max(gaps)), golden.versions, _versions())


def require(context: Context) -> None:
  """The self-check of a run that is continued; writes the golden file where it is missing.

  Raises:
    NumericsError: this machine computes something else than what the run folder keeps.
    UserError: the golden file is damaged.
  """
  comparison = compare(context)
  if comparison is None:
    keep(context)
  elif not comparison.ok:
    raise NumericsError(f'{comparison.text}; remove {context.workdir / GOLDEN_FILE} to go on with '
                        'the new numbers')


def paths_gap(context: Context, stage: str) -> float:
  """Returns the largest difference between training forward pass and prefill + decode, in nats."""
  config, params = context.model(stage), context.params(stage)
  rows = _encode(context, PROMPTS)
  full, cached = (path(config, params, _pad(rows)) for path in (_full, _cached))
  return float(max(np.abs(full[i] - cached[i])[:len(row) - 1].max() for i, row in enumerate(rows)))


def _measure(context: Context, stage: str, texts: Sequence[str]) -> list[Prompt]:
  rows = _encode(context, texts)
  scores = _full(context.model(stage), context.params(stage), _pad(rows))
  return [Prompt(text, row, values[:len(row) - 1].tolist())
          for text, row, values in zip(texts, rows, scores, strict=True)]


def _gap(old: Prompt, new: Prompt) -> float:
  if old.tokens != new.tokens:
    return math.inf
  return float(np.abs(np.subtract(old.logprobs, new.logprobs)).max())


def _encode(context: Context, texts: Sequence[str]) -> list[list[int]]:
  return [context.corpus.tokenizer.encode(text)[:_LENGTH] for text in texts]


def _pad(rows: Sequence[Sequence[int]]) -> Int32[np.ndarray, 'N S']:
  """Returns the rows with zeros behind them, which no token before them can see."""
  tokens = np.zeros((len(rows), _LENGTH), np.int32)
  for padded, row in zip(tokens, rows, strict=True):
    padded[:len(row)] = row
  return tokens


def _full(config: ModelConfig, params: dict[str, Any], tokens: Int32[np.ndarray, 'N S']
          ) -> Float32[np.ndarray, 'N S-1']:
  """Returns the log-probs of `tokens[:, 1:]` from one forward pass."""
  @jax.jit
  def scores(params, tokens):
    logits = models.forward(config, params, tokens).logits
    return _pick(logits[:, :-1], tokens[:, 1:])

  return np.asarray(scores(params, tokens))


def _cached(config: ModelConfig, params: dict[str, Any], tokens: Int32[np.ndarray, 'N S']
            ) -> Float32[np.ndarray, 'N S-1']:
  """Returns the same from a prefill of the first half and one decode step for each token after."""
  step = jax.jit(functools.partial(models.forward, config))
  count, length = tokens.shape
  half = length // 2
  cache = models.init_cache(config, count, length)
  parts = []
  for start, end in [(0, half), *((i, i + 1) for i in range(half, length - 1))]:
    out = step(params, tokens[:, start:end], cache=cache)
    cache = out.cache
    parts.append(_pick(out.logits, tokens[:, start + 1:end + 1]))
  return np.concatenate(parts, axis=1)


def _pick(logits: Float[Array, 'N S V'], targets: Int[Array, 'N S']) -> Float[Array, 'N S']:
  """Returns the log-prob of each target."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def _versions() -> dict[str, str]:
  return versions.of_run() | {'device': jax.devices()[0].device_kind}
