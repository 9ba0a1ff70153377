"""Compares a checkpoint folder that we exported as transformers reads it with our own logits.

In two steps, because transformers has an environment of its own (see `generate.py`):

  .venv/bin/python tests/models/hf_golden/check_export.py write FOLDER
  SCRATCH/bin/python tests/models/hf_golden/check_export.py compare FOLDER

`write` reads the folder with our importer and writes `FOLDER/our_logits.npz`; `compare` loads it
with `AutoModelForCausalLM` in float32, prints the largest difference and exits with 1 if it is
above 1e-4 of the largest logit, or if transformers misses a tensor or finds one too many.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

RESULT = 'our_logits.npz'
TOLERANCE = 1e-4
ROWS, LENGTH = 2, 64


def write(folder: pathlib.Path) -> None:
  """Writes tokens and the logits that our model gives them, in float32."""
  from composer_jax import api

  model = api.load(folder)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, model.config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
  logits = model.forward(model.params, tokens).logits
  np.savez_compressed(folder / RESULT, tokens=tokens, logits=np.asarray(logits))


def compare(folder: pathlib.Path) -> bool:
  """Prints how far transformers is from our logits; returns whether that is near enough."""
  import torch
  import transformers

  with np.load(folder / RESULT) as data:
    tokens, ours = data['tokens'], data['logits']
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation='eager', experts_implementation='eager',
      output_loading_info=True)
  with torch.no_grad():
    theirs = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
  error = float(np.abs(theirs - ours).max() / np.abs(theirs).max())
  problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
  print(json.dumps({'relative_difference': error, 'tolerance': TOLERANCE, 'loading': problems}))
  return error <= TOLERANCE and not problems


def main() -> int:
  """Reads the command line; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('step', choices=('write', 'compare'))
  parser.add_argument('folder', type=pathlib.Path)
  options = parser.parse_args()
  if options.step == 'compare':
    return 0 if compare(options.folder) else 1
  write(options.folder)
  return 0


if __name__ == '__main__':
  sys.exit(main())
