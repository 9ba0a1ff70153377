"""Line charts as inline SVG: no library at view time, colours from the page's style sheet."""

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 34
COLOURS = 8  # classes c0 .. c7 of the style sheet
MAX_POINTS = 400  # a line

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Series:
  """One line of a chart.

  Attributes:
    name: shown in the legend.
    points: (x, y); values that are not finite leave a gap.
    style: `line`, `faint` (raw values behind a mean), `dash` and `short` (references) or `marks`
      (dots that are not joined).
    colour: index of a colour class.
    bars: interval of each point as (low, high), or empty.
  """

  name: str
  points: Sequence[Point]
  style: str = 'line'
  colour: int = 0
  bars: Sequence[tuple[float, float]] = ()


@dataclasses.dataclass(frozen=True)
class Axes:
  """The mapping from values to pixels."""

  x_low: float
  x_high: float
  y_low: float
  y_high: float
  log: bool

  def x(self, value: float) -> float:
    """Pixel of an x value."""
    return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

  def y(self, value: float) -> float:
    """Pixel of a y value."""
    share = (self.scale(value) - self.y_low) / (self.y_high - self.y_low)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

  def scale(self, value: float) -> float:
    """Value on the linear scale that is drawn: log10 on a logarithmic axis."""
    return math.log10(value) if self.log else value

  def shows(self, point: Point) -> bool:
    """Whether a point can be drawn."""
    return (math.isfinite(point[0]) and math.isfinite(point[1])
            and (not self.log or point[1] > 0))


def line_chart(series: Sequence[Series], *, x_label: str = 'step', log: bool = False,
               x_range: tuple[float, float] | None = None) -> str:
  """Returns the SVG element of a chart, or a note when no point can be drawn.

  Args:
    series: the lines, later ones on top.
    x_label: under the horizontal axis.
    log: logarithmic vertical axis; values that are not positive are left out.
    x_range: fixed horizontal range; that of the points by default.
  """
  axes = _axes(series, log, x_range)
  if axes is None:
    return '<p class="empty">no finite value</p>'
  parts = [
      f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
      f'data-axes="{axes.x_low} {axes.x_high} {axes.y_low} {axes.y_high} {int(axes.log)}">',
      *_grid(axes, x_label)]
  for item in series:
    parts += _draw(item, axes)
  return '\n'.join([*parts, '<line class="cross" y1="12" y2="216"/>', '</svg>'])


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
  """Returns at most about `limit` points that keep each bucket's lowest and highest value."""
  if len(points) <= limit:
    return list(points)
  size = math.ceil(2 * len(points) / limit)
  kept: list[Point] = []
  for start in range(0, len(points), size):
    bucket = range(start, min(start + size, len(points)))
    ends = {min(bucket, key=lambda i: _order(points[i])),
            max(bucket, key=lambda i: _order(points[i]))}
    kept += [points[i] for i in sorted(ends)]
  return kept


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
  """Returns round numbers inside [low, high], about `count` of them; only integers if `whole`."""
  raw = (high - low) / count
  power = 10.0 ** math.floor(math.log10(raw))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
  step = max(step, 1) if whole else step
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
  """Formats a tick: 0.001, 12, 3.5k, 1e-07."""
  if value == 0:
    return '0'
  if abs(value) >= 1e6 or abs(value) < 1e-3:
    return f'{value:.0e}' if f'{value:.0e}' == f'{value:.1e}'.replace('.0', '') else f'{value:.1e}'
  return f'{value / 1000:g}k' if abs(value) >= 10000 else f'{value:.4g}'


def _order(point: Point) -> float:
  return point[1] if math.isfinite(point[1]) else -math.inf


def _axes(series: Sequence[Series], log: bool, x_range: tuple[float, float] | None
          ) -> Axes | None:
  probe = Axes(0, 1, 0, 1, log)
  points = [p for s in series for p in s.points if probe.shows(p)]
  points += [(p[0], y) for s in series for p, bar in zip(s.points, s.bars, strict=False)
             for y in bar if probe.shows((p[0], y))]
  if not points:
    return None
  ys = [probe.scale(p[1]) for p in points]
  low, high = min(ys), max(ys)
  margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
  x_low, x_high = x_range or (min(p[0] for p in points), max(p[0] for p in points))
  if x_low == x_high:
    x_low, x_high = x_low - 1, x_high + 1
  return Axes(x_low, x_high, low - margin, high + margin, log)


def _grid(axes: Axes, x_label: str) -> list[str]:
  bottom = HEIGHT - BOTTOM
  parts = []
  for tick in ticks(axes.y_low, axes.y_high, 5):
    if axes.log and abs(tick - round(tick)) > 1e-6:
      continue
    y = HEIGHT - BOTTOM - (tick - axes.y_low) / (axes.y_high - axes.y_low) * (bottom - TOP)
    text = number(10.0 ** tick) if axes.log else number(tick)
    parts += [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
              f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>']
  for tick in ticks(axes.x_low, axes.x_high, 6, whole=True):
    parts.append(f'<text class="tick" x="{axes.x(tick):.1f}" y="{bottom + 15}" '
                 f'text-anchor="middle">{number(tick)}</text>')
  parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
               f'<text class="tick" x="{WIDTH - RIGHT}" y="{bottom + 29}" text-anchor="end">'
               f'{html.escape(x_label)}</text>')
  return parts


def _draw(series: Series, axes: Axes) -> list[str]:
  """Returns the elements of one series; gaps split a line into several."""
  name = html.escape(series.name, quote=True)
  css = f's-{series.style} c{series.colour % COLOURS}'
  parts = []
  for point, (low, high) in zip(series.points, series.bars, strict=False):
    if axes.shows(point):
      x = axes.x(point[0])
      parts.append(f'<line class="bar c{series.colour % COLOURS}" x1="{x:.1f}" x2="{x:.1f}" '
                   f'y1="{axes.y(low):.1f}" y2="{axes.y(high):.1f}"/>')
  runs: list[list[Point]] = [[]]
  for point in thin(series.points):
    if axes.shows(point):
      runs[-1].append(point)
    elif runs[-1]:
      runs.append([])
  for run in filter(None, runs):
    pixels = ' '.join(f'{axes.x(x):.1f},{axes.y(y):.1f}' for x, y in run)
    if series.style == 'marks' or len(run) == 1:
      parts += [f'<circle class="dot c{series.colour % COLOURS}" cx="{p.split(",")[0]}" '
                f'cy="{p.split(",")[1]}" r="3"/>' for p in pixels.split()]
    parts.append(f'<polyline class="{css}" data-name="{name}" points="{pixels}"/>')
  return parts
