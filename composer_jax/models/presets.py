"""Named model shapes: the public checkpoints, small proxies of Kimi K2.5, and the tiny one."""

from collections.abc import Callable

from composer_jax.models.config import ModelConfig, RopeScaling


def tiny(vocab_size: int = 512) -> ModelConfig:
  """A shape like the demo's: every part of Kimi K2.5 at a size two CPU cores train in minutes.

  Args:
    vocab_size: V.

  Returns:
    Three layers (one dense), 8 experts of which 2 are chosen, one shared expert, one MTP layer.
  """
  return ModelConfig(
      vocab_size=vocab_size, num_nextn_predict_layers=1, initializer_range=0.08,
      rope_theta=1000.0, max_position_embeddings=256, scan_unroll=2)


def deepseek_v3() -> ModelConfig:
  """DeepSeek-V3, R1 and V3.1 (arXiv 2412.19437, section 4.2; public `config.json`).

  Returns:
    61 layers (3 dense), 256 experts of which 8 are chosen in 4 of 8 groups, and the MTP layer.
  """
  return ModelConfig(
      vocab_size=129280, hidden_size=7168, num_hidden_layers=61, first_k_dense_replace=3,
      intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
      num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4, norm_topk_prob=True,
      routed_scaling_factor=2.5, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512,
      qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6,
      rope_theta=10000.0, rope_scaling=RopeScaling(factor=40.0), max_position_embeddings=163840,
      num_nextn_predict_layers=1, remat='full')


def moonlight_16b_a3b() -> ModelConfig:
  """Moonlight-16B-A3B (arXiv 2502.16982; public `config.json`): no query bottleneck, no YaRN.

  Returns:
    27 layers (1 dense), 64 experts of which 6 are chosen, 2 shared ones.
  """
  return ModelConfig(
      vocab_size=163840, hidden_size=2048, num_hidden_layers=27, first_k_dense_replace=1,
      intermediate_size=11264, moe_intermediate_size=1408, n_routed_experts=64,
      num_experts_per_tok=6, n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=True,
      routed_scaling_factor=2.446, num_attention_heads=16, q_lora_rank=0, kv_lora_rank=512,
      qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-5,
      rope_theta=50000.0, max_position_embeddings=8192, remat='full')


def kimi_k2() -> ModelConfig:
  """Kimi K2 (July 2025; public `config.json`): 131072 tokens of context.

  Returns:
    The shape of `kimi_k2_5` with its own YaRN.
  """
  return _kimi(64, 61, RopeScaling(factor=32.0, beta_fast=1.0))


def kimi_k2_5() -> ModelConfig:
  """The text model of Kimi K2.5 (Composer 2 report, section 3; its public `config.json`).

  Returns:
    61 layers, 384 experts of which 8 are chosen; 1.0264e12 parameters. It ships no MTP layer.
  """
  return _kimi(64, 61, RopeScaling(factor=64.0))


def proxy_50m() -> ModelConfig:
  """A proxy of Kimi K2.5 with about 50M active parameters; see `_proxy`."""
  return _proxy(7, 6)


def proxy_300m() -> ModelConfig:
  """A proxy of Kimi K2.5 with about 300M active parameters; see `_proxy`."""
  return _proxy(13, 12)


def proxy_1b() -> ModelConfig:
  """A proxy of Kimi K2.5 with about 1B active parameters; see `_proxy`."""
  return _proxy(20, 19)


def proxy_3b() -> ModelConfig:
  """A proxy of Kimi K2.5 with about 3B active parameters; see `_proxy`."""
  return _proxy(28, 28)


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    preset.__name__: preset
    for preset in (tiny, deepseek_v3, moonlight_16b_a3b, kimi_k2, kimi_k2_5, proxy_50m, proxy_300m,
                   proxy_1b, proxy_3b)}


def _proxy(heads: int, layers: int) -> ModelConfig:
  """Returns Kimi K2.5 made narrower and shallower alike.

  Every width follows the number of heads as in Kimi K2.5 (D = 112 H, F = 32 H, bottlenecks 24 H
  and 8 H, V = 2560 H; the head dimensions stay), depth follows width, and 8 of 384 experts are
  chosen. Which sizes to offer is our choice.
  """
  return _kimi(heads, layers, RopeScaling(factor=64.0))


def _kimi(heads: int, layers: int, scaling: RopeScaling) -> ModelConfig:
  context = scaling.factor * scaling.original_max_position_embeddings
  return ModelConfig(
      vocab_size=2560 * heads, hidden_size=112 * heads, num_hidden_layers=layers,
      first_k_dense_replace=1, intermediate_size=288 * heads, moe_intermediate_size=32 * heads,
      n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1,
      norm_topk_prob=True, routed_scaling_factor=2.827, num_attention_heads=heads,
      q_lora_rank=24 * heads, kv_lora_rank=8 * heads, qk_nope_head_dim=128, qk_rope_head_dim=64,
      v_head_dim=128, rms_norm_eps=1e-5, rope_theta=50000.0, rope_scaling=scaling,
      max_position_embeddings=int(context), remat='full')
