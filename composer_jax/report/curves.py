"""Which metrics of a stage share a chart, and how each is drawn."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from composer_jax.report.folder import Stage
from composer_jax.report.svg import Point, Series, line_chart

MEAN_STEPS = 8  # window of the mean drawn over raw rewards
LOG_RATIO = 30  # highest over lowest value from which a logarithmic axis helps


@dataclasses.dataclass(frozen=True)
class Chart:
  """One chart ready for the page.

  Attributes:
    title: heading.
    note: one sentence about what to look for; may be empty.
    legend: (name, colour index, style) of the lines.
    svg: markup.
  """

  title: str
  note: str
  legend: list[tuple[str, int, str]]
  svg: str


@dataclasses.dataclass(frozen=True)
class Spec:
  """A chart that a stage gets when it has metrics for it.

  Attributes:
    title: heading.
    pattern: full match on metric names; the group that matched is the legend's name.
    note: see `Chart`.
    log: logarithmic vertical axis, when the values allow it.
    make: from the matching (legend name, points) to series; plain lines by default.
  """

  title: str
  pattern: str
  note: str = ''
  log: bool = False
  make: Callable[[list[tuple[str, list[Point]]]], list[Series]] | None = None


def _smoothed(found: list[tuple[str, list[Point]]]) -> list[Series]:
  """Draws raw values faintly behind their mean over the last `MEAN_STEPS` rows."""
  series = []
  for colour, (name, points) in enumerate(found):
    series.append(Series(name, points, 'faint', colour))
    series.append(Series(f'{name}, mean of {MEAN_STEPS}', running_mean(points), 'line', colour))
  return series


def _means(found: list[tuple[str, list[Point]]]) -> list[Series]:
  """Draws only the mean over the last `MEAN_STEPS` rows, where there are many lines."""
  return lines([(name, running_mean(points)) for name, points in found])


CHARTS = (
    Spec('Reward', r'(reward_mean|solved_fraction)',
         f'Without its KL part. Raw, and mean of {MEAN_STEPS} rows.', make=_smoothed),
    Spec('Held-out bits per byte', r'eval/bits_per_byte/(.+)',
         'Long dashes: gzip -9, short dashes: xz -9, on the same files.'),
    Spec('Loss', r'(loss|cross_entropy|mtp_kl|z)',
         'Mean of the steps since the row before, each over its trained tokens.'),
    Spec('Loss on held-out demonstrations', r'eval/(heldout_loss)',
         'Nats per model token; prompts and tool results do not count.'),
    Spec('Entropy', r'(entropy)', 'Nats a sampled token.'),
    Spec('Trainer against sampler', r'(gap_(?:max|mean|p99))',
         '|log-prob of the trainer − log-prob of the sampler| of the same token.', log=True),
    Spec('Staleness', r'(staleness_\w+)', 'Policy updates between sampling and training.'),
    Spec('KL to the reference', r'(kl)', 'k1 estimate, placed in the reward.'),
    Spec('Length', r'((?:sampled|tokens|result_tokens)_per_episode)',
         'Tokens an episode.', make=_smoothed),
    Spec('Tool calls', r'(\w+)_per_episode', f'Counts an episode, mean of {MEAN_STEPS} rows.',
         make=_means),
    Spec('Reward parts', r'reward/(.+)',
         f'Mean of {MEAN_STEPS} rows; kl is that of the trained rollouts.', make=_means),
    Spec('Solved, by class of bug', r'success/(.+)', f'Mean of {MEAN_STEPS} rows.', make=_means),
    Spec('Groups', r'(pass_at_k|finish_rate|zero_signal_fraction)',
         'Any member right; the agent called finish; all members alike, so nothing to learn.'),
    Spec('Throughput', r'(\w+_per_s)', log=True),
    Spec('Gradient norm', r'(grad_norm)', 'Before clipping.', log=True),
    Spec('Learning rate', r'(lr)'),
    Spec('Expert load', r'(load_max)',
         'Share of the busiest expert over the mean; the selection bias pulls it down.'),
)


def charts(stage: Stage, compression: dict[tuple[str, str], float]
           ) -> tuple[list[Chart], list[Chart]]:
  """Returns the charts of a stage and, apart, one for each metric that no chart claims.

  Args:
    stage: the stage.
    compression: (source, tool) -> bits per byte of other compressors on the held-out files.
  """
  names = stage.names()
  first, used = [], set()
  for spec in CHARTS:
    matched = [(m.group(m.lastindex or 0), name) for name in names
               if name not in used and (m := re.fullmatch(spec.pattern, name))]
    if not matched:
      continue
    used |= {name for _, name in matched}
    found = [(label, stage.series(name)) for label, name in matched]
    series = spec.make(found) if spec.make else lines(found)
    if spec.title.startswith('Held-out'):
      series += _references(compression, stage, [label for label, _ in found])
    first.append(chart(spec.title, series, spec.note, log=spec.log))
  rest = [chart(name, [Series(name, stage.series(name))]) for name in names if name not in used]
  return first, rest


def chart(title: str, series: Sequence[Series], note: str = '', *, log: bool = False,
          x_range: tuple[float, float] | None = None, x_label: str = 'step') -> Chart:
  """Draws a chart; a logarithmic axis is used where all values are positive and far apart."""
  values = [y for s in series for _, y in s.points if math.isfinite(y)]
  log = log and bool(values) and min(values) > 0 and max(values) / min(values) > LOG_RATIO
  gone = sum(not math.isfinite(y) for s in series for _, y in s.points)
  if gone:
    note = f'{note} {gone} values are not finite.'.strip()
  return Chart(title, note, [(s.name, s.colour % 8, s.style) for s in series],
               line_chart(series, log=log, x_range=x_range, x_label=x_label))


def lines(found: Sequence[tuple[str, list[Point]]]) -> list[Series]:
  """Returns one plain line for each (name, points)."""
  return [Series(name, points, 'line', colour) for colour, (name, points) in enumerate(found)]


def running_mean(points: Sequence[Point], window: int = MEAN_STEPS) -> list[Point]:
  """Returns the mean over the last `window` points at each point (fewer at the start)."""
  means = []
  for end in range(1, len(points) + 1):
    part = points[max(0, end - window):end]
    means.append((part[-1][0], sum(y for _, y in part) / len(part)))
  return means


def _references(compression: dict[tuple[str, str], float], stage: Stage, sources: list[str]
                ) -> list[Series]:
  """Returns dashed horizontal lines over the steps of the stage, in the colour of their source."""
  low, high = stage.rows[0]['step'], stage.rows[-1]['step']
  return [Series(f'{tool} {source}'.strip(), [(low, value), (high, value)],
                 'dash' if tool == 'gzip' else 'short',
                 sources.index(source) if source in sources else len(sources))
          for (source, tool), value in sorted(compression.items())]
