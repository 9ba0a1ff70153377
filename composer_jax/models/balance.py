"""Selection biases: kept away from the optimizer, moved once per step by each expert's load."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

Params = dict[str, Any]
Trainable = Literal['all', 'mtp']

_NAME = 'selection_bias'


def partition(params: Params, trainable: Trainable = 'all') -> tuple[Params, Params]:
  """Splits parameters into what the optimizer trains and what it never sees.

  Args:
    params: of the whole model.
    trainable: "all" but the selection biases, or the "mtp" layer alone (but its bias).

  Returns:
    (trainable, frozen), nested dicts without common leaves; `combine` puts them together again.

  Raises:
    ValueError: "mtp" for parameters without an MTP layer.
  """
  if trainable == 'mtp':
    if 'mtp' not in params:
      raise ValueError('there is no MTP layer to train')
    inside, bias = partition({'mtp': params['mtp']})
    return inside, {name: leaf for name, leaf in params.items() if name != 'mtp'} | bias
  chosen, frozen = {}, {}
  for name, value in params.items():
    if name == _NAME:
      frozen[name] = value
    elif isinstance(value, dict):
      chosen[name], inner_frozen = partition(value)
      if inner_frozen:
        frozen[name] = inner_frozen
    else:
      chosen[name] = value
  return chosen, frozen


def combine(trainable: Params, frozen: Params) -> Params:
  """Inverse of `partition`."""
  merged = dict(trainable)
  for name, value in frozen.items():
    merged[name] = combine(merged.get(name, {}), value) if isinstance(value, dict) else value
  return merged


def update_selection_bias(frozen: Params, counts: Num[Array, 'L E'], rate: float,
                          trainable: Trainable = 'all') -> Params:
  """Returns the biases after one optimizer step (DeepSeek-V3, section 2.1.2).

  Every expert below its layer's mean load goes up by `rate`, every one above it down, and one at
  the mean stays. Call it once per optimizer step with the counts of the whole step.

  Args:
    frozen: the frozen half of `partition`.
    counts: tokens per expert of each MoE layer of the trunk and, when it ran, of the MTP layer as
      one more row (`RouterOut.counts`).
    rate: step size (DeepSeek-V3: 0.001).
    trainable: as given to `partition`; under "mtp" the trunk's biases stay as they are.

  Raises:
    ValueError: the number of rows fits neither the trunk nor the trunk with the MTP layer.
  """
  if not frozen:
    return frozen
  layers = frozen['moe_layers']['moe']['router'][_NAME].shape[0] if 'moe_layers' in frozen else 0
  extra = 1 if 'mtp' in frozen else 0
  if counts.shape[0] not in (layers, layers + extra):
    raise ValueError(f'counts have {counts.shape[0]} rows for {layers} MoE layers and {extra} MTP')
  result = dict(frozen)
  if layers and trainable == 'all':
    result['moe_layers'] = _moved(frozen['moe_layers'], counts[:layers], rate)
  if counts.shape[0] > layers:
    result['mtp'] = {'block': _moved(frozen['mtp']['block'], counts[layers], rate)}
  return result


def _moved(block: Params, counts: Num[Array, '... E'], rate: float) -> Params:
  bias: Float[Array, '... E'] = block['moe']['router'][_NAME]
  # E * count against the sum: exact in integers, so that equal loads never look unequal.
  difference = counts.sum(axis=-1, keepdims=True) - counts * counts.shape[-1]
  moved = bias + rate * jnp.sign(difference).astype(bias.dtype)
  return {'moe': {'router': {_NAME: moved}}}
