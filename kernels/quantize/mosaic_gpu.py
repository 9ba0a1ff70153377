"""Quantisation for Hopper and Blackwell: one pass over tiles of 128 rows and columns.

Persistent programs, several a multiprocessor, of one warpgroup each: TMA brings a tile into shared
memory, a thread takes a row (for the transposed copy the tensor core's layout gives a column to
four threads), and values and scales go out by TMA, the scales in the layout in which tcgen05 reads
them. The next tile is on its way while one is written out; other programs of the multiprocessor
fill the remaining gaps.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from composer_jax.kernels import platform
from composer_jax.kernels.mosaic import tile
from composer_jax.kernels.quantize import mosaic_arithmetic
from composer_jax.kernels.quantize.types import Quantized

_TILE = 128
_SMEM = 200 * 1024  # bytes of a multiprocessor that its programs share
_MXFP8_BLOCK, _NVFP4_BLOCK = 32, 16
_LEAST = 2.0 ** -116 * 2688  # rows below it become zeros, see `reference`


def obstacle() -> str | None:
  """Says what is missing, None on a Hopper or Blackwell GPU."""
  return None if platform.obstacle('sm90') is None else platform.obstacle('sm100')


def obstacle_nvfp4() -> str | None:
  """Says what is missing, None on a Blackwell GPU: Hopper does not convert to E2M1."""
  return platform.obstacle('sm100')


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What a kernel does.

  Attributes:
    format: of the row-wise copy: "mxfp8" or "nvfp4".
    transposed: write the column-wise copy too, in MXFP8.
    swiglu: the input is gate and up side by side.
    columns: tiles of columns of the result.
    dtype: of the input.
  """

  format: str
  transposed: bool
  swiglu: bool
  columns: int
  dtype: jnp.dtype

  @property
  def parts(self) -> int:
    """Arrays of the size of the result that are read."""
    return 2 if self.swiglu else 1

  @property
  def pieces(self) -> int:
    """Pieces across that a tile is loaded in, of 128 bytes, or less to need fewer registers."""
    return 4 if self.swiglu else _TILE * self.dtype.itemsize // 128

  @property
  def steps(self) -> int:
    """Tiles that a task loads: one, or NVFP4's rows twice, as their largest value comes first."""
    return 2 * self.columns if self.format == 'nvfp4' else 1

  @property
  def programs(self) -> int:
    """Programs of a multiprocessor."""
    size = self.parts * self.dtype.itemsize + 1 + self.transposed
    by_registers = 2 if self.swiglu else 3
    return max(1, min(by_registers, _SMEM // (size * _TILE * _TILE)))

  @property
  def row_layout(self):
    """A thread a row, 16 bytes at a time."""
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(16 // self.dtype.itemsize)


def quantize(x: Float[Array, "*experts R' K'"], format: str) -> Quantized:
  """Returns `x`, whose last two axes are multiples of 128, in a format; see `api.quantize`."""
  *experts, rows, columns = x.shape
  flat = x.reshape(-1, columns)
  rowwise, _ = _run(flat, jnp.full((1,), flat.shape[0] // _TILE, jnp.int32), format)
  return jax.tree.map(lambda a: a.reshape(
      *experts, a.shape[0] * rows // flat.shape[0], *a.shape[1:]), rowwise)


def quantize_both(x: Float[Array, 'A K'], tiles: Int[Array, '1'], format: str
                  ) -> tuple[Quantized, Quantized]:
  """Returns both copies of rows, sides multiples of 128; see `api.quantize_both`.

  Only tiles of bfloat16 are transposed on their way; other rows are read twice.
  """
  if x.dtype != jnp.bfloat16:
    return _run(x, tiles, format)[0], quantize(x.T, 'mxfp8')
  return _run(x, tiles, format, transposed=True)


def swiglu_quantize(gate_up: Float[Array, 'A F2'], tiles: Int[Array, '1'], format: str
                    ) -> Quantized:
  """Returns the product, A and F multiples of 128, in a format; see `api.swiglu_quantize`."""
  return _run(gate_up, tiles, format, swiglu=True)[0]


def _run(x: Array, tiles: Int[Array, '1'], format: str, *, transposed: bool = False,
         swiglu: bool = False) -> tuple[Quantized, Quantized | None]:
  """Quantises the first `tiles` tiles of rows."""
  if x.dtype != jnp.bfloat16:
    x = x.astype(jnp.float32)
  plan = _Plan(format, transposed, swiglu, x.shape[1] // _TILE // (2 if swiglu else 1), x.dtype)
  rows, columns, p = x.shape[0], plan.columns * _TILE, plan
  struct = jax.ShapeDtypeStruct
  nvfp4 = format == 'nvfp4'
  value, block = ((jnp.float4_e2m1fn, _NVFP4_BLOCK) if nvfp4
                  else (jnp.float8_e4m3fn, _MXFP8_BLOCK))
  scale = jnp.float8_e4m3fn if nvfp4 else jnp.uint8
  quads = _TILE // (4 * block)  # scale tiles of a tile
  out = {'values': struct((rows, columns), value),
         'scales': struct((rows // _TILE, plan.columns * quads, 32, 16), scale)}
  scratch = {
      'x_s': tile((_TILE, _TILE // p.pieces), x.dtype, p.parts * p.pieces),
      'values_s': tile((_TILE, _TILE), value, 1),
      'scales_s': plgpu.SMEM((quads, 32, 16), scale),
      'order_s': plgpu.SMEM((4 * quads, _TILE), jnp.float32 if nvfp4 else jnp.int32),
      'full': plgpu.Barrier(num_arrivals=p.parts * p.pieces)}
  if nvfp4:
    out['token'] = struct((rows,), jnp.float32)
    scratch['token_s'] = plgpu.SMEM((_TILE,), jnp.float32)
  if transposed:
    out |= {'values_t': struct((columns, rows), jnp.float8_e4m3fn),
            'scales_t': struct((plan.columns, rows // _TILE, 32, 16), jnp.uint8)}
    scratch |= {'values_t_s': tile((_TILE, _TILE), jnp.float8_e4m3fn, 1),
                'scales_t_s': plgpu.SMEM((1, 32, 16), jnp.uint8),
                'order_t_s': plgpu.SMEM((4, _TILE), jnp.int32)}

  def kernel(tiles_g, x_g, *refs, **scratch):
    _body(plan, {'tiles': tiles_g, 'x': x_g, **dict(zip(out, refs, strict=True)), **scratch})

  got = dict(zip(out, plgpu.kernel(
      kernel, out_type=tuple(out.values()), grid=(platform.current().cores * plan.programs,),
      grid_names=('program',), kernel_name='quantize', scratch_types=scratch,
      compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
  )(tiles, x), strict=True))

  def e8m0(name):
    return lax.bitcast_convert_type(got[name], jnp.float8_e8m0fnu)

  rowwise = Quantized(got['values'], got['scales'] if nvfp4 else e8m0('scales'), got.get('token'))
  return rowwise, Quantized(got['values_t'], e8m0('scales_t')) if transposed else None


def _body(plan: _Plan, refs: dict) -> None:
  """What every program does."""
  program, programs = lax.axis_index('program'), lax.axis_size('program')
  per_stripe = 1 if plan.format == 'nvfp4' else plan.columns  # tasks of 128 rows
  tasks = lax.div(refs['tiles'][0] * per_stripe - program + programs - 1, programs)

  def place(step):
    """Returns the tile of rows and of columns."""
    task = program + lax.div(step, plan.steps) * programs
    column = lax.rem(task if plan.format == 'mxfp8' else step, plan.columns)
    return lax.div(task, per_stripe), column

  def load(step):
    @pl.when(step < tasks * plan.steps)
    def _():
      row, column = place(step)
      width = _TILE // plan.pieces
      for part in range(plan.parts):
        for piece in range(plan.pieces):
          first = (part * plan.columns + column) * _TILE + piece * width
          plgpu.copy_gmem_to_smem(refs['x'].at[pl.ds(row * _TILE, _TILE), pl.ds(first, width)],
                                  refs['x_s'].at[part * plan.pieces + piece], refs['full'])

  load(0)

  @pl.loop(0, tasks)
  def _(task):
    first = task * plan.steps
    token = None
    if plan.format == 'nvfp4':
      token = _token_scales(plan, refs, first, load, place(first)[0])

    @pl.loop(first + plan.steps // 2, first + plan.steps)
    def _(step):
      plgpu.barrier_wait(refs['full'])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      _quantize_tile(plan, refs, token)
      plgpu.commit_smem()
      load(step + 1)
      _store(plan, refs, *place(step))

  plgpu.wait_smem_to_gmem(0)


def _token_scales(plan: _Plan, refs: dict, first: Array, load, row: Array) -> Array:
  """Returns the scale of each row, after reading all of its tiles, and writes it out."""
  def per_tile(step, largest):
    plgpu.barrier_wait(refs['full'])
    for piece in range(plan.pieces):
      for x in _inputs(plan, refs, piece, _NVFP4_BLOCK):
        largest = jnp.maximum(largest, mosaic_arithmetic.bits(x).max(axis=1))
      plgpu.commit_smem()  # also keeps the compiler from loading all pieces first
    load(step + 1)
    return largest

  zero = plgpu.layout_cast(jnp.zeros((_TILE,), jnp.int32), plan.row_layout.reduce(1))
  bits = lax.fori_loop(first, first + plan.columns, per_tile, zero)
  row_largest = lax.bitcast_convert_type(bits, jnp.float32)
  row_largest = jnp.where(row_largest >= _LEAST, row_largest, 1.0)
  token = mosaic_arithmetic.quotient(row_largest, jnp.full_like(row_largest, 6 * 448))
  token = jnp.where(bits < mosaic_arithmetic.INFINITY, token, jnp.float32(jnp.nan))
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  plgpu.store(refs['token_s'], token, optimized=False)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(refs['token_s'], refs['token'].at[pl.ds(row * _TILE, _TILE)])
  return token


def _quantize_tile(plan: _Plan, refs: dict, token: Array | None) -> None:
  """Writes the tile's values and scales to shared memory."""
  layout = plan.row_layout
  block = _NVFP4_BLOCK if plan.format == 'nvfp4' else _MXFP8_BLOCK
  values = []
  for piece in range(plan.pieces):
    for x in _inputs(plan, refs, piece, block):
      value, scale = (mosaic_arithmetic.mxfp8(x, layout) if token is None
                      else mosaic_arithmetic.nvfp4(x, token, layout))
      # Writing the scale here keeps the compiler from loading all pieces first.
      plgpu.store(refs['order_s'].at[len(values)], scale, optimized=False)
      values.append(value)
  values = lax.concatenate(values, 1)
  wide = plgpu.Layout.TCGEN05_TMEM_NATIVE(128 // jnp.finfo(values.dtype).bits)
  plgpu.store(refs['values_s'].at[0], plgpu.layout_cast(values, wide), optimized=False)
  for quad in range(refs['scales_s'].shape[0]):
    _order(refs['order_s'].at[pl.ds(4 * quad, 4)], refs['scales_s'].at[quad])
  if plan.transposed:
    _quantize_transposed(plan, refs)


def _quantize_transposed(plan: _Plan, refs: dict) -> None:
  """Writes the tile's columns, in blocks of 32 rows, to shared memory."""
  layout, width = plgpu.Layout.WGMMA, _TILE // plan.pieces
  for piece in range(plan.pieces):
    own = pl.ds(piece * width, width)
    values = []
    for i in range(4):
      rows = refs['x_s'].at[piece, pl.ds(i * _MXFP8_BLOCK, _MXFP8_BLOCK)]
      x = plgpu.load(rows.transpose((1, 0)), layout=layout, optimized=False)
      value, scale = mosaic_arithmetic.mxfp8(x.astype(jnp.float32), layout)
      values.append(value)
      plgpu.store(refs['order_t_s'].at[i, own], scale, optimized=False)
    plgpu.store(refs['values_t_s'].at[0, own], lax.concatenate(values, 1), optimized=False)
  _order(refs['order_t_s'], refs['scales_t_s'].at[0])


def _inputs(plan: _Plan, refs: dict, piece: int, block: int) -> Iterator[Float[Array, '128 C']]:
  """Yields blocks of a piece of the tile in float32, a thread a row; few are alive at a time."""
  parts = [plgpu.load(refs['x_s'].at[part * plan.pieces + piece], layout=plan.row_layout,
                      optimized=False) for part in range(plan.parts)]
  for start in range(0, parts[0].shape[1], block):
    x, *up = (lax.slice(part, (0, start), (_TILE, start + block)).astype(jnp.float32)
              for part in parts)
    # The barrier keeps the compiler from working on several blocks at once.
    yield lax.optimization_barrier(x * (1.0 / (1.0 + jnp.exp(-x))) * up[0] if up else x)


def _order(scratch, target) -> None:
  """Copies scales of four blocks and 128 rows into the tcgen05 layout.

  Rows change threads through shared memory on the way. Every warp then holds all scales, a row of
  16 in each of its threads; the selections are known when the kernel is compiled.
  """
  shape = (32, 16)
  layout = plgpu.Layout.TILED(plgpu.Tiling((shape,)), (plgpu.Replicated(4),), (-2,), -1)
  place = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), layout)
  ordered = plgpu.layout_cast(jnp.zeros(shape, scratch.dtype), layout)
  for column in range(16):
    part = plgpu.load(scratch.at[column % 4, pl.ds(column // 4 * 32, 32)],
                      layout=layout.reduce(1), optimized=False)
    ordered = jnp.where(place == column, mosaic_arithmetic.wide(part, shape, layout), ordered)
  plgpu.store(target, ordered.astype(target.dtype), optimized=False)


def _store(plan: _Plan, refs: dict, row: Array, column: Array) -> None:
  """Sends a tile's values and scales on their way."""
  rows, columns = (pl.ds(i * _TILE, _TILE) for i in (row, column))
  plgpu.copy_smem_to_gmem(refs['values_s'].at[0], refs['values'].at[rows, columns])
  quads = refs['scales_s'].shape[0]
  plgpu.copy_smem_to_gmem(refs['scales_s'],
                          refs['scales'].at[row, pl.ds(column * quads, quads)])
  if plan.transposed:
    plgpu.copy_smem_to_gmem(refs['values_t_s'].at[0], refs['values_t'].at[columns, rows])
    plgpu.copy_smem_to_gmem(refs['scales_t_s'], refs['scales_t'].at[column, pl.ds(row, 1)])
