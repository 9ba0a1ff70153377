"""Shape of the model: the field names of a Hugging Face DeepSeek-V3 `config.json`, plus ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from composer_jax.config import as_dict, build, check_least
from composer_jax.models import hf_fields
from composer_jax.models.precision import Policy


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """YaRN (arXiv 2309.00071) as DeepSeek-V3 and Kimi K2.5 parametrise it.

  Attributes:
    factor: context extension; usable length is `factor * original_max_position_embeddings`.
    original_max_position_embeddings: length the unscaled frequencies were trained for, tokens.
    beta_fast: rotations over the original length above which a frequency is left alone.
    beta_slow: rotations below which a frequency is divided by `factor`.
    mscale: numerator of the cos/sin multiplier (see `rope.frequencies`).
    mscale_all_dim: denominator of that multiplier, and the growth of the softmax scale.
  """

  factor: float = 1.0
  original_max_position_embeddings: int = 4096
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 1.0
  mscale_all_dim: float = 1.0

  def __post_init__(self):
    if self.factor < 1.0 or self.original_max_position_embeddings < 1:
      raise ValueError('rope_scaling: factor must be >= 1 and the original length >= 1')


# How the function is computed, or its parameters first drawn.
_HOW = ('moe_impl', 'remat', 'scan_unroll', 'precision', 'attention', 'initializer_range')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A DeepSeek-V3 shaped transformer (Composer 2 report, section 3; Kimi K2.5 `config.json`).

  The names are those of the Hugging Face config, so a checkpoint's file maps field by field.

  Attributes:
    vocab_size: V, number of token ids.
    hidden_size: D, width of the residual stream.
    num_hidden_layers: L, dense and MoE layers together, without the MTP layer.
    first_k_dense_replace: how many of the first layers have a dense feed-forward.
    intermediate_size: feed-forward width of the dense layers.
    moe_intermediate_size: F, width of one expert.
    n_routed_experts: E.
    num_experts_per_tok: K.
    n_shared_experts: experts every token passes through, fused into one of width `n * F`.
    n_group: groups the experts are divided into for group-limited routing (1: no limit).
    topk_group: how many groups a token may choose from.
    norm_topk_prob: divide the K gate weights by their sum.
    routed_scaling_factor: multiplies the gate weights.
    num_attention_heads: H.
    q_lora_rank: width of the query bottleneck, 0 for a direct projection.
    kv_lora_rank: C, width of the latent that keys and values are made from.
    qk_nope_head_dim: per-head query/key width without position.
    qk_rope_head_dim: R, rotary width, shared by all heads on the key side.
    v_head_dim: per-head value width.
    rms_norm_eps: epsilon under the root of every RMSNorm on the residual stream.
    latent_norm_eps: the same of the two norms inside attention (query and key/value bottleneck),
      which DeepSeek's and transformers' code build with 1e-6 whatever `rms_norm_eps` says. Not a
      field of `config.json`.
    rope_theta: rotary base.
    rope_scaling: YaRN, or None for plain rotary embedding.
    max_position_embeddings: longest sequence, tokens.
    num_nextn_predict_layers: 0, or 1 for a multi-token-prediction layer.
    initializer_range: standard deviation of initial matrices and embeddings.
    tie_word_embeddings: the head is the transposed embedding.
    moe_impl: "dense" runs every expert on every token as one GEMM, "grouped" sorts rows by expert
      for a grouped GEMM, "auto" follows `moe.choose_impl`. All compute the same function.
    remat: "full" recomputes each layer, the MTP layer too, in the backward pass, "none" keeps its
      activations.
    scan_unroll: layers per iteration of the layer scan; as many as layers means no loop.
    attention: form of the attention, all computing the same function: "expanded" makes keys and
      values for every head, "absorbed" works on the latents, "auto" follows `mla.choose_form`.
    precision: in which format each matrix product runs, or the name of a policy of
      `precision.POLICIES`; parameters are float32 whatever it says.
  """

  vocab_size: int = 512
  hidden_size: int = 96
  num_hidden_layers: int = 3
  first_k_dense_replace: int = 1
  intermediate_size: int = 288
  moe_intermediate_size: int = 48
  n_routed_experts: int = 8
  num_experts_per_tok: int = 2
  n_shared_experts: int = 1
  n_group: int = 1
  topk_group: int = 1
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 1.0
  num_attention_heads: int = 4
  q_lora_rank: int = 0
  kv_lora_rank: int = 64
  qk_nope_head_dim: int = 32
  qk_rope_head_dim: int = 16
  v_head_dim: int = 32
  rms_norm_eps: float = 1e-5
  latent_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  max_position_embeddings: int = 1024
  num_nextn_predict_layers: int = 0
  initializer_range: float = 0.02
  tie_word_embeddings: bool = False
  moe_impl: Literal['auto', 'dense', 'grouped'] = 'auto'
  remat: Literal['none', 'full'] = 'none'
  scan_unroll: int = 1
  attention: Literal['auto', 'expanded', 'absorbed'] = 'auto'
  precision: Policy = Policy()

  def __post_init__(self):
    check_least(self, 1, 'vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads',
                'kv_lora_rank', 'qk_nope_head_dim', 'v_head_dim', 'n_routed_experts', 'n_group',
                'topk_group', 'scan_unroll', 'intermediate_size', 'moe_intermediate_size',
                'max_position_embeddings')
    check_least(self, 0, 'q_lora_rank', 'n_shared_experts', 'initializer_range')
    for name in ('rms_norm_eps', 'latent_norm_eps', 'rope_theta'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name} must be above 0, got {getattr(self, name)}')
    if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
      raise ValueError('first_k_dense_replace must be between 0 and num_hidden_layers')
    if self.qk_rope_head_dim < 2 or self.qk_rope_head_dim % 2:
      raise ValueError(f'qk_rope_head_dim must be even, got {self.qk_rope_head_dim}')
    if self.num_nextn_predict_layers not in (0, 1):
      raise ValueError('num_nextn_predict_layers must be 0 or 1')
    if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
      raise ValueError('n_group must divide n_routed_experts, and topk_group be at most n_group')
    if not 1 <= self.num_experts_per_tok <= self.experts_in_reach:
      raise ValueError(f'num_experts_per_tok must be between 1 and {self.experts_in_reach}, the '
                       'experts that group-limited routing leaves')
    if self.moe_impl == 'dense' and not self.precision.routed_experts.plain:
      raise ValueError('moe_impl "dense" puts all experts of a token into one contraction, where '
                       'rounded formats would share scales: take "grouped" or "auto"')

  def different_function(self, other: 'ModelConfig') -> str | None:
    """Returns the first field in which two configs are different functions of equal parameters.

    Left out are fields that say how the function is computed, or how parameters are first drawn.
    """
    for field in dataclasses.fields(self):
      if field.name not in _HOW and getattr(self, field.name) != getattr(other, field.name):
        return field.name
    return None

  @classmethod
  def from_hf(cls, raw: Mapping[str, Any], where: str = 'config.json', **ours: Any
              ) -> 'ModelConfig':
    """Returns the config of a Hugging Face checkpoint.

    Args:
      raw: the object of its `config.json`: DeepSeek-V3 and V3.1, Kimi K2, the multimodal wrapper of
        Kimi K2.5 (of which the text model is taken), Moonlight.
      where: the file, for messages.
      **ours: fields that such a file does not have, such as `remat`.

    Raises:
      UserError: names a field that is missing, of the wrong type, unknown, or not implemented.
    """
    return build(cls, hf_fields.to_kwargs(raw, where) | ours, where)

  def to_hf(self) -> dict[str, Any]:
    """Returns the object of a `config.json` that `from_hf` reads back and transformers loads."""
    return hf_fields.from_fields(as_dict(self))

  @property
  def num_moe_layers(self) -> int:
    """L_moe: MoE layers in the trunk (the MTP layer is not one of them)."""
    return self.num_hidden_layers - self.first_k_dense_replace

  @property
  def experts_in_reach(self) -> int:
    """Experts left to a token after group-limited routing."""
    return self.n_routed_experts // self.n_group * self.topk_group

  @property
  def qk_head_dim(self) -> int:
    """Width of a whole query or key head."""
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def latent_dim(self) -> int:
    """C + R: floats that the cache keeps per token and layer."""
    return self.kv_lora_rank + self.qk_rope_head_dim
