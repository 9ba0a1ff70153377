"""Mixture-of-experts feed-forward: routed experts plus a shared one (DeepSeek-V3, eq. 12)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from composer_jax.kernels.moe_permute import api as moe_permute
from composer_jax.models import config as config_lib
from composer_jax.models import layers, precision
from composer_jax.models import router as router_lib


def choose_impl(config: config_lib.ModelConfig, tokens: int) -> str:
  """Returns "dense" or "grouped" for `moe_impl` and T tokens in one call.

  "auto" (our choice) takes "grouped" above 16 experts, and with fewer if T is at least 512 and E
  more than twice K; else "dense". On two CPU cores, D = 96, F = 48 and T = 1024, a layer's forward
  and backward pass costs 18 ms dense and 9 ms grouped of one core with 8 experts of which 2 are
  chosen, 37 and 17 ms with 16 and 4, 117 and 24 ms with 32 and 4. Dense compiles in a third of the
  time, which counts for the many small shapes of generation.

  Rounded formats need "grouped": "dense" contracts all of a token's experts at once, which would
  make them share scales.
  """
  if not config.precision.routed_experts.plain:
    return 'grouped'
  if config.moe_impl != 'auto':
    return config.moe_impl
  experts = config.n_routed_experts
  wasteful = experts > 2 * config.num_experts_per_tok
  return 'grouped' if experts > 16 or (wasteful and tokens >= 512) else 'dense'


class Moe(nnx.Module):
  """`shared(x) + sum_k weight_k * expert_k(x)` with SwiGLU experts."""

  def __init__(self, config: config_lib.ModelConfig):
    d, f, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    self.config = config
    self.router = router_lib.Router(config)
    self.experts_gate_up = layers.matrix(config, (e, d, 2 * f), ('expert', 'embed', 'ffn'))
    self.experts_down = layers.matrix(config, (e, f, d), ('expert', 'ffn', 'embed'))
    if config.n_shared_experts:
      self.shared = layers.Mlp(config, config.n_shared_experts * f,
                               config.precision.shared_expert)

  def __call__(self, x: Float[Array, 'T D'], valid: Bool[Array, 'T'], **replay
               ) -> tuple[Float[Array, 'T D'], router_lib.Choice]:
    """Returns the layer's output and the routing; padding tokens get the shared expert only."""
    choice = self.router(x, valid, **replay)
    fused = bool(self.config.n_shared_experts)
    if choose_impl(self.config, x.shape[0]) == 'dense':
      fused &= self.config.precision.shared_expert.plain
      y = self._dense(x, choice, fused)
    else:
      y, fused = self._grouped(x, choice, valid), False
    if self.config.n_shared_experts and not fused:
      y = y + self.shared(x)
    return y, choice

  def _dense(self, x, choice, with_shared):
    """Every expert, shared ones too, on every token: a GEMM, the gate weights, a GEMM back."""
    gate_up, down, weights = self.experts_gate_up[...], self.experts_down[...], choice.weights
    e, d, f = gate_up.shape[0], x.shape[-1], down.shape[1]
    if with_shared:
      n = self.config.n_shared_experts
      shared = jnp.moveaxis(self.shared.gate_up[...].reshape(d, 2, n, f), 2, 0)
      gate_up = jnp.concatenate([gate_up, shared.reshape(n, d, 2 * f)])
      down = jnp.concatenate([down, self.shared.down[...].reshape(n, f, d)])
      weights = jnp.concatenate([weights, jnp.ones((x.shape[0], n), weights.dtype)], axis=1)
      e += n
    hidden = layers.linear(x, jnp.swapaxes(gate_up, 0, 1))
    hidden = layers.swiglu(hidden, weights.astype(x.dtype)[:, :, None])
    return layers.linear(hidden.reshape(-1, e * f), down.reshape(e * f, d))

  def _grouped(self, x, choice, valid):
    """Rows sorted by expert, padding last, and one grouped GEMM each way."""
    formats = self.config.precision.routed_experts
    plan = moe_permute.make_plan(choice.indices, valid, self.config.n_routed_experts)
    hidden = layers.swiglu(precision.grouped(
        formats, moe_permute.permute(x, plan), self.experts_gate_up[...], plan.group_sizes))
    out = precision.grouped(formats, hidden, self.experts_down[...], plan.group_sizes)
    weights = jnp.take_along_axis(choice.weights, choice.indices, axis=-1)
    return moe_permute.combine(out, plan, weights)
