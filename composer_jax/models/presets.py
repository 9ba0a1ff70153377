"""Named model shapes."""

from composer_jax.models import config as config_lib


def tiny(vocab_size: int = 512) -> config_lib.ModelConfig:
  """A shape like the demo's: every part of Kimi K2.5 at a size two CPU cores train in minutes.

  Args:
    vocab_size: V.

  Returns:
    Three layers (one dense), 8 experts of which 2 are chosen, one shared expert, one MTP layer.
  """
  return config_lib.ModelConfig(
      vocab_size=vocab_size, num_nextn_predict_layers=1, initializer_range=0.08,
      rope_theta=1000.0, max_position_embeddings=256, scan_unroll=2)


def kimi_k2_5() -> config_lib.ModelConfig:
  """The text model of Kimi K2.5 (Composer 2 report, section 3; its public `config.json`).

  Returns:
    61 layers, 384 experts of which 8 are chosen; 1.0264e12 parameters. It ships no MTP layer.
  """
  return config_lib.ModelConfig(
      vocab_size=163840, hidden_size=7168, num_hidden_layers=61, first_k_dense_replace=1,
      intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=384,
      num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
      routed_scaling_factor=2.827, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512,
      qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-5,
      rope_theta=50000.0, max_position_embeddings=262144, num_nextn_predict_layers=0,
      initializer_range=0.02, tie_word_embeddings=False, remat='full',
      rope_scaling=config_lib.RopeScaling(
          factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
          mscale=1.0, mscale_all_dim=1.0))
