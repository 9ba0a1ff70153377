import jax
import pytest


@pytest.fixture
def quick_compilation():
  """For gradients, whose compilation takes most of the time: optimisations are not tested there."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


def _products(jaxpr, inside=()):
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if 'dot' in name:
      yield equation, inside
    for inner in jax.tree.leaves(equation.params):
      if hasattr(inner, 'eqns'):
        yield from _products(inner, (*inside, name))


@pytest.fixture
def products():
  """A function jaxpr -> every matrix product in it, with the names of the operations around it."""
  return lambda closed: list(_products(closed.jaxpr))
