"""The TPU kernel's own code, interpreted with race detection, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import testing
from composer_jax.kernels.grouped_matmul import api, pallas_tpu, reference
from composer_jax.kernels.grouped_matmul.cases import TILED, Case

CASES = (*TILED, Case('many small groups in a tile', (3, 1, 0, 50, 9, 100, 2), k=24, n=520))


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 1e-2), ('float32', 1e-5)])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_product_and_gradients(case, dtype, tolerance):
  x, w, sizes, dy = case.arrays()
  x, w, dy = (jnp.asarray(a, dtype) for a in (x, w, dy))

  @jax.jit
  def passes(x, w, dy):
    return (pallas_tpu.forward(x, w, sizes, transpose=False),
            pallas_tpu.forward(dy, w, sizes, transpose=True),
            pallas_tpu.weight_gradient(x, dy, sizes))

  with testing.interpreted('tpu'):
    got = passes(x, w, dy)
  x, w, dy = (jnp.asarray(a, jnp.float32) for a in (x, w, dy))
  want = (reference.forward(x, w, sizes, transpose=False),
          reference.forward(dy, w, sizes, transpose=True), reference.weight_gradient(x, dy, sizes))
  for ours, exact, limit in zip(got, want, (tolerance, tolerance, 1e-5), strict=True):
    np.testing.assert_allclose(np.asarray(ours, np.float32), exact, rtol=0,
                               atol=limit * max(np.abs(exact).max(), 1e-30))
  assert [y.dtype for y in got] == [dtype, dtype, 'float32']
  assert not np.asarray(got[0], np.float32)[sum(case.sizes):].any()


def test_it_is_refused_elsewhere():
  with pytest.raises(ValueError, match='needs a TPU'):
    api.grouped_matmul(jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.array([2, 2]), impl='pallas_tpu')
