"""The hand-over of weights: copies, exact dtypes, rising versions."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.rl.weight_sync import WeightSync, manifest


def test_the_sampler_owns_its_weights():
  """The trainer donates what it published; the sampler's copy must live on with its values."""
  sync = WeightSync()
  params = {'a': jnp.arange(4.0), 'router': {'selection_bias': jnp.ones((2, 3), jnp.float32)}}
  sync.publish(0, params)
  pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
  assert not pointers & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(sync.current()[1])}
  step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
  step(params)
  assert jax.tree.leaves(params)[0].is_deleted()
  version, held = sync.current()
  assert version == 0
  np.testing.assert_array_equal(held['a'], np.arange(4.0))


def test_a_changed_dtype_shape_or_name_is_refused():
  sync = WeightSync()
  sync.publish(0, {'router': jnp.ones((2, 2), jnp.float32)})
  with pytest.raises(ValueError, match='router.*float32.*bfloat16'):
    sync.publish(1, {'router': jnp.ones((2, 2), jnp.bfloat16)})
  with pytest.raises(ValueError, match='router'):
    sync.publish(1, {'router': jnp.ones((2, 3), jnp.float32)})
  with pytest.raises(ValueError, match='gate'):
    sync.publish(1, {'gate': jnp.ones((2, 2), jnp.float32)})
  assert sync.current()[0] == 0
  assert manifest({'x': jnp.zeros(3, jnp.uint16)}) == {"['x']": ('uint16', (3,))}


def test_versions_rise_and_are_never_torn():
  sync = WeightSync()
  with pytest.raises(RuntimeError):
    sync.current()
  sync.publish(0, {'a': jnp.zeros(1000), 'b': jnp.zeros(10)})
  with pytest.raises(ValueError, match='version 0'):
    sync.publish(0, {'a': jnp.zeros(1000), 'b': jnp.zeros(10)})
  bad, stop = [], threading.Event()

  def read():
    while not stop.is_set():
      version, params = sync.current()
      if {float(params['a'][-1]), float(params['b'][0])} != {float(version)}:
        bad.append(version)

  thread = threading.Thread(target=read)
  thread.start()
  for version in range(1, 30):
    sync.publish(version, {'a': jnp.full(1000, float(version)), 'b': jnp.full(10, float(version))})
  stop.set()
  thread.join()
  assert not bad and sync.current()[0] == 29
