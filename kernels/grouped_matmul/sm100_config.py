"""How the Blackwell kernel cuts a problem, and what it reads."""

import dataclasses

import jax

from composer_jax.kernels import tiles

_ROWS = tiles.ROWS
_TENSOR_MEMORY = 512  # columns of 128 numbers of 32 bits


@dataclasses.dataclass(frozen=True)
class Config:
  """How a problem is cut.

  Attributes:
    columns: columns of an output tile: 128 or 256.
    stages: tiles along the contraction that are in flight.
    collective: two multiprocessors work on a tile, of 256 rows.
    band: height of a band of tiles, see `schedule`.
  """

  columns: int = 128
  stages: int = 4
  collective: bool = False
  band: int = 8

  @property
  def height(self) -> int:
    """Multiprocessors that work on a tile, and its height in tiles of 128 rows."""
    return 2 if self.collective else 1


@dataclasses.dataclass(frozen=True)
class Operands:
  """Both sides of a product, and how their tiles lie.

  Attributes:
    a: rows of the output; `[rows, K]`, or `[K, rows]` if not `a_k_minor`.
    b: columns of the output; `[columns, K]` or `[K, columns]`, with a leading axis of groups unless
      all groups share it.
    a_k_minor: the contraction axis of `a` is its last one.
    b_k_minor: the same for `b`.
    k: width of a tile along the contraction.
    a_scale: block scales of `a`, if it has any, then `b` has too.
    b_scale: those of `b`.
    a_token: factors of the rows, if there are any, then of the columns too.
    b_token: factors of the columns.
  """

  a: jax.Array
  b: jax.Array
  a_k_minor: bool
  b_k_minor: bool
  k: int
  a_scale: jax.Array | None = None
  b_scale: jax.Array | None = None
  a_token: jax.Array | None = None
  b_token: jax.Array | None = None

  @property
  def arrays(self) -> dict[str, jax.Array]:
    """What the kernel reads, by name."""
    names = ('a', 'b', 'a_scale', 'b_scale', 'a_token', 'b_token')
    return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

  @property
  def scale_quads(self) -> int:
    """Block scales of a row of a tile, in fours."""
    return self.k // self.block // 4

  @property
  def block(self) -> int:
    """Numbers under one scale."""
    return self.a.shape[1] // (self.a_scale.shape[1] * 4)


@dataclasses.dataclass(frozen=True)
class Accumulators:
  """Where the two accumulators lie in tensor memory.

  Attributes:
    step: columns from the start of one to the start of the other.
    shared: columns that belong to both.
  """

  step: int
  shared: int

  @property
  def lag(self) -> int:
    """How many tasks ago columns were last used that a product writes."""
    return 1 if self.shared else 2


def accumulators_of(operands: Operands, config: Config, part: int) -> Accumulators:
  """Keeps the accumulators as far apart as tensor memory allows, in parts that are stored at once.

  The block scales of 128 rows take a column for every block along the contraction.
  """
  scales = 0
  if operands.a_scale is not None:
    scales = config.stages * operands.scale_quads * 4 * (1 + config.columns // _ROWS)
  step = min((_TENSOR_MEMORY - scales - config.columns) // part * part, config.columns)
  if step <= 0:
    raise ValueError(f'grouped_matmul: {config.stages} stages of scales and an accumulator of '
                     f'{config.columns} columns do not fit tensor memory')
  return Accumulators(step, config.columns - step)
