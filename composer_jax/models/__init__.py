"""The model as pure functions over nested dicts of arrays; nothing outside sees a module object."""

from composer_jax.models.balance import combine, partition, update_selection_bias
from composer_jax.models.cache import Cache, init_cache
from composer_jax.models.config import ModelConfig, RopeScaling
from composer_jax.models.mtp import attach_mtp
from composer_jax.models.precision import POLICIES, Formats, Policy
from composer_jax.models.presets import PRESETS, kimi_k2_5, tiny
from composer_jax.models.router import RouterOut, Routing
from composer_jax.models.transformer import ForwardOut, forward, head, init, logical_axes

__all__ = [
    'POLICIES', 'PRESETS', 'Cache', 'Formats', 'ForwardOut', 'ModelConfig', 'Policy', 'RopeScaling',
    'RouterOut', 'Routing', 'attach_mtp', 'combine', 'forward', 'head', 'init', 'init_cache',
    'kimi_k2_5', 'logical_axes', 'partition', 'tiny', 'update_selection_bias',
]
