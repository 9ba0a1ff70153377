import jax
import pytest


@pytest.fixture
def quick_compilation():
  """For gradients, whose compilation takes most of the time: optimisations are not tested there."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
