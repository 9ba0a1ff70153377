"""Computes the golden data with transformers: one document at a time, float32, eager attention.

Needs an environment of its own (about 1 GB), on any machine, no accelerator:

  python3.11 -m venv SCRATCH
  SCRATCH/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
  SCRATCH/bin/python tests/models/hf_golden/generate.py

Writes `data/<case>.npz` for every case of `grid.CASES` (names as arguments: only those) and
`data/ropes.npz`; with `--checkpoint`, the saved model in `checkpoint/` instead. Running it again
gives the same numbers up to the float32 rounding of the machine's matrix library.
"""

import argparse
import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from hf_golden import grid, weights

CHECKPOINT = grid.DATA.parent / 'checkpoint'


def build(config: dict, tensors: dict[str, np.ndarray]) -> transformers.DeepseekV3ForCausalLM:
  """Returns transformers' model with these weights; fails unless they are exactly its own."""
  config = {key: value for key, value in config.items() if key != 'model_type'}
  model = transformers.DeepseekV3ForCausalLM._from_config(
      transformers.DeepseekV3Config(**config), attn_implementation='eager',
      experts_implementation='eager', dtype=torch.float32)
  left = dict(tensors)
  with torch.no_grad():
    for name, value in model.state_dict().items():
      if name == 'lm_head.weight' and config['tie_word_embeddings']:
        continue
      value.copy_(torch.from_numpy(stacked(name, left)))
  assert not left, sorted(left)
  return model


def stacked(name: str, left: dict[str, np.ndarray]) -> np.ndarray:
  """Takes out of `left` what transformers holds as one tensor: the experts are stacked."""
  prefix, _, kind = name.rpartition('.experts.')
  if not prefix:
    return left.pop(name)
  parts = ('gate_proj', 'up_proj') if kind == 'gate_up_proj' else ('down_proj',)
  experts = []
  while f'{prefix}.experts.{len(experts)}.{parts[0]}.weight' in left:
    at = f'{prefix}.experts.{len(experts)}'
    experts.append(np.concatenate([left.pop(f'{at}.{part}.weight') for part in parts]))
  return np.stack(experts)


def gradients(model: transformers.DeepseekV3ForCausalLM) -> dict[str, np.ndarray]:
  """Returns the gradient of every parameter under the names of a checkpoint."""
  out = {}
  for name, parameter in model.named_parameters():
    value = parameter.grad
    value = np.zeros(parameter.shape, np.float32) if value is None else value.numpy()
    prefix, _, kind = name.rpartition('.experts.')
    if not prefix:
      out[name] = value
      continue
    for expert, matrix in enumerate(value):
      at = f'{prefix}.experts.{expert}'
      if kind == 'gate_up_proj':
        out[f'{at}.gate_proj.weight'], out[f'{at}.up_proj.weight'] = np.split(matrix, 2)
      else:
        out[f'{at}.down_proj.weight'] = matrix
  return out


@torch.no_grad()
def margin(gate: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
  """Returns how far every token is from another choice of groups or experts (selection scores)."""
  scores = (x.reshape(-1, x.shape[-1]) @ gate.weight.T).sigmoid() + gate.e_score_correction_bias
  least = torch.full(scores.shape[:1], torch.inf)
  if gate.topk_group < gate.num_group:
    grouped = scores.reshape(len(scores), gate.num_group, -1)
    best = grouped.topk(2, dim=-1)[0].sum(-1).sort(dim=-1, descending=True)
    least = best[0][:, gate.topk_group - 1] - best[0][:, gate.topk_group]
    outside = best[1][:, gate.topk_group:, None] == torch.arange(gate.num_group)
    grouped = grouped.masked_fill(outside.any(1)[:, :, None], -torch.inf)
    scores = grouped.reshape(scores.shape)
  top = scores.sort(dim=-1, descending=True)[0]
  return torch.minimum(least, top[:, gate.top_k - 1] - top[:, gate.top_k]).numpy()


def run(model: transformers.DeepseekV3ForCausalLM, documents: list[grid.Document]
        ) -> dict[str, np.ndarray]:
  """Runs each document alone; returns logits, sorted choices, their margins and gradients."""
  logits, routes, margins = [], [], []
  gates = [m for m in model.modules() if isinstance(m, modeling.DeepseekV3TopkRouter)]

  def record(gate, inputs, outputs):
    routes.append(np.sort(outputs[2].numpy(), axis=-1))
    margins.append(margin(gate, inputs[0]))

  handles = [gate.register_forward_hook(record) for gate in gates]
  for document in documents:
    tokens = torch.from_numpy(document.tokens).long()[None]
    # With a mask, jumps of positions are not taken for borders between documents.
    out = model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False,
                position_ids=torch.from_numpy(document.positions).long()[None]).logits[0]
    (out * torch.from_numpy(document.cotangent)).sum().backward()
    logits.append(out.detach().numpy())
  for handle in handles:
    handle.remove()
  layers = range(len(gates))
  return {'logits': np.concatenate(logits),
          'routes': np.array([np.concatenate(routes[n::len(gates)]) for n in layers], np.uint8),
          'margins': np.array([np.concatenate(margins[n::len(gates)]) for n in layers],
                              np.float32)}


def write_case(case: grid.Case) -> None:
  """Writes the golden data of one case."""
  model = build(case.text, case.tensors())
  out = run(model, case.documents())
  found = gradients(model)
  names = [name for name in weights.shapes(case.text)
           if not name.endswith('e_score_correction_bias')]
  assert sorted(found) == names
  closest = out['margins'].min(initial=np.inf)
  assert closest > 5 * grid.TIE, f'{case.name}: {closest:.1e} is near a tie; take another seed'
  path = grid.DATA / f'{case.name}.npz'
  np.savez_compressed(
      path, **out, gradients=np.concatenate([found[name].ravel() for name in names]),
      multiplier=model.model.rotary_emb.attention_scaling,
      softmax_scale=model.model.layers[0].self_attn.scaling)
  print(f'{case.name}: {path.stat().st_size // 1024} KB, logits of {out["logits"].std():.2f}, '
        f'closest choice {closest:.1e}')


def write_ropes() -> None:
  """Writes the inverse frequencies of `grid.ROPES`, and after them the cos/sin multiplier."""
  out = {}
  for name, changes in grid.ROPES.items():
    text = grid.Case(name, changes).text
    rotary = modeling.DeepseekV3RotaryEmbedding(transformers.DeepseekV3Config(
        **{key: value for key, value in text.items() if key != 'model_type'}))
    out[name] = np.append(rotary.inv_freq.numpy(), np.float32(rotary.attention_scaling))
  np.savez_compressed(grid.DATA / 'ropes.npz', **out)


def write_checkpoint() -> None:
  """Writes a model as transformers saves it, in several shards, and its logits."""
  shutil.rmtree(CHECKPOINT, ignore_errors=True)
  case = grid.CHECKPOINT
  model = build(case.text, case.tensors())
  model.save_pretrained(CHECKPOINT, max_shard_size='60KB')
  np.savez_compressed(CHECKPOINT / 'golden.npz', **run(model, case.documents()))
  index = json.loads((CHECKPOINT / 'model.safetensors.index.json').read_text())
  assert set(index['weight_map']) == set(weights.shapes(case.text))
  print(f'checkpoint: {len(set(index["weight_map"].values()))} shards')


def main() -> None:
  """Reads the command line and writes what it asks for."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*')
  parser.add_argument('--checkpoint', action='store_true', help='only the saved checkpoint')
  options = parser.parse_args()
  torch.set_num_threads(1)
  grid.DATA.mkdir(exist_ok=True)
  if options.checkpoint:
    write_checkpoint()
    return
  write_ropes()
  for case in grid.CASES:
    if not options.names or case.name in options.names:
      write_case(case)


if __name__ == '__main__':
  main()
