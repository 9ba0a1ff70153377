"""The interpreter itself: block scaling as defined, planted races found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from composer_jax.kernels import testing

FORMATS = {'mxfp8': (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32),
           'nvfp4': (jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16)}


def pack_scales(scales):
  rows, blocks = scales.shape
  return (scales.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
          .reshape(rows // 128, blocks // 4, 32, 16))


def scaled_matmul(a, b, a_scale, b_scale, block):
  """`a @ b.T` of one 128 x 128 tile by the block-scaled MMA."""
  k = a.shape[1]
  bits = jnp.finfo(a.dtype).bits
  swizzle = plgpu.find_swizzle(k * bits)
  transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))

  def body(a_g, b_g, as_g, bs_g, o_g, a_s, b_s, as_s, bs_s, as_t, bs_t, acc, o_s, full, done):
    @plgpu.warp_map
    def _(warp):
      @pl.when(warp == 0)
      def _():
        for source, target in ((a_g, a_s), (b_g, b_s), (as_g, as_s), (bs_g, bs_s)):
          plgpu.copy_gmem_to_smem(source, target, full)

      @pl.when(warp == 1)
      def _():
        plgpu.barrier_wait(full)
        plgpu.async_copy_scales_to_tmem(as_s, as_t)
        plgpu.async_copy_scales_to_tmem(bs_s, bs_t)
        plgpu.tcgen05_mma(acc, a_s, b_s.T, a_scale=as_t, b_scale=bs_t, accumulate=False)
        plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)
    o_s[...] = plgpu.async_load_tmem(acc)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s, o_g)
    plgpu.wait_smem_to_gmem(0)
    plgpu.wait_load_tmem()

  scales = functools.partial(plgpu.TMEM, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
  tile = (8, 32)
  return plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32), scratch_types={
          'a_s': plgpu.SMEM(a.shape, a.dtype, transforms=transforms),
          'b_s': plgpu.SMEM(b.shape, b.dtype, transforms=transforms),
          'as_s': plgpu.SMEM(a_scale.shape, a_scale.dtype),
          'bs_s': plgpu.SMEM(b_scale.shape, b_scale.dtype),
          'as_t': scales((128, k // block), a_scale.dtype),
          'bs_t': scales((128, k // block), b_scale.dtype),
          'acc': plgpu.TMEM((128, 128), jnp.float32),
          'o_s': plgpu.SMEM((128, 128), jnp.float32, transforms=(
              plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128))),
          'full': plgpu.Barrier(num_arrivals=4),
          'done': plgpu.Barrier(orders_tensor_core=True)})(a, b, a_scale, b_scale)


@pytest.mark.parametrize('format', FORMATS)
def test_block_scaled_product_of_the_interpreter(format):
  dtype, scale_dtype, block = FORMATS[format]
  rng = np.random.default_rng(0)
  a, b = (jnp.asarray(rng.normal(size=(128, 256)), jnp.float32).astype(dtype) for _ in range(2))
  scales = [jnp.asarray(2.0 ** rng.integers(-3, 4, size=(128, 256 // block))).astype(scale_dtype)
            for _ in range(2)]
  with testing.interpreted('sm100'):
    out = scaled_matmul(a, b, *map(pack_scales, scales), block)
  wide = [np.asarray(x, np.float64) * np.repeat(np.asarray(s, np.float64), block, axis=1)
          for x, s in zip((a, b), scales, strict=True)]
  expected = wide[0] @ wide[1].T
  np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_scales_unpack_as_they_were_packed():
  scales = np.arange(256 * 8).reshape(256, 8)
  np.testing.assert_array_equal(testing.unpack_scales(pack_scales(scales)), scales)


def double(x, *, wait_first):
  def body(x_g, o_g, x_s, ready):
    plgpu.copy_gmem_to_smem(x_g, x_s, ready)
    if wait_first:
      plgpu.barrier_wait(ready)
    x_s[...] = x_s[...] * 2
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_s, o_g)
    plgpu.wait_smem_to_gmem(0)
    if not wait_first:
      plgpu.barrier_wait(ready)

  return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[
      plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)


def test_a_race_on_a_gpu_is_found():
  x = jnp.ones((64, 64))
  with testing.interpreted('sm90'):
    np.testing.assert_array_equal(double(x, wait_first=True), 2 * np.ones((64, 64)))
  with pytest.raises(Exception, match='RACE'), testing.interpreted('sm90'):
    jax.block_until_ready(double(x, wait_first=False))
  with testing.interpreted('sm90'):  # a failed run leaves nothing behind
    np.testing.assert_array_equal(double(x, wait_first=True), 2 * np.ones((64, 64)))


def copied(x, *, wait_first):
  def body(x_hbm, o_ref, x_vmem, ready):
    copy = pltpu.make_async_copy(x_hbm, x_vmem, ready)
    copy.start()
    if wait_first:
      copy.wait()
    o_ref[...] = x_vmem[...] + 1
    if not wait_first:
      copy.wait()

  return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA]
                        )(x)


def test_a_race_on_a_tpu_is_found():
  x = jnp.ones((8, 128))
  with testing.interpreted('tpu'):
    np.testing.assert_array_equal(copied(x, wait_first=True), 2 * np.ones((8, 128)))
  with pytest.raises(Exception, match='RACE'), testing.interpreted('tpu'):
    jax.block_until_ready(copied(x, wait_first=False))
