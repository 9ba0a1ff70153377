"""Peer of `composer-jax bench train_step`: transformers' DeepSeek-V3 with torch's AdamW.

Runs in an interpreter of its own that has torch and transformers, and needs nothing else. It says
{"torch": VERSION, "transformers": VERSION}, then reads one JSON object a line from standard input
and answers each with one on standard output:

  {"do": "load", "config": {...}, "arrays": FILE.npz, "threads": N, "experts": PATH, "lr": X}
      -> {"parameters": N, "load_s": X}
  {"do": "loss"} -> {"loss": X}                  mean cross entropy, no update
  {"do": "step"} -> {"seconds": X, "loss": X}    forward, backward, update
  {"do": "gemm", "size": N} -> {"seconds": X}    one dense float32 product

An error becomes {"error": TEXT}. The end of standard input ends it.
"""

import time

import answering  # beside this script
import numpy as np
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


class Peer(answering.Answerer):
  """The model, its optimizer and the one batch."""

  def __init__(self):
    self.model = self.optimizer = self.tokens = None

  def load(self, message):
    """Builds the model from Hugging Face names, with fresh optimizer state."""
    start = time.perf_counter()
    torch.set_num_threads(message['threads'])
    config = DeepseekV3Config(**message['config'])
    config._attn_implementation = 'sdpa'
    config._experts_implementation = message['experts']
    with np.load(message['arrays']) as arrays:
      tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    self.tokens = tensors.pop('tokens').long()
    # from_pretrained turns the checkpoint's names and shapes into the module's, and names
    # what is missing or left over
    self.model, info = DeepseekV3ForCausalLM.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32, output_loading_info=True)
    wrong = {what: sorted(map(str, names)) for what, names in info.items() if names}
    if wrong:
      raise ValueError(f'weights do not fit: {wrong}')
    self.model.train()
    parameters = list(self.model.parameters())
    self.optimizer = torch.optim.AdamW(  # gains do not decay on the other side either
        [{'params': [p for p in parameters if p.ndim > 1]},
         {'params': [p for p in parameters if p.ndim == 1], 'weight_decay': 0.0}],
        lr=message['lr'])
    return {'parameters': sum(p.numel() for p in parameters),
            'load_s': time.perf_counter() - start}

  def loss(self, unused_message):
    """Returns the loss of the batch."""
    with torch.no_grad():
      return {'loss': self._forward().item()}

  def step(self, unused_message):
    """Trains one step and times it, the transfer of the loss included."""
    start = time.perf_counter()
    self.optimizer.zero_grad(set_to_none=True)
    loss = self._forward()
    loss.backward()
    self.optimizer.step()
    value = loss.item()
    return {'seconds': time.perf_counter() - start, 'loss': value}

  def _forward(self):
    return self.model(input_ids=self.tokens, labels=self.tokens).loss


if __name__ == '__main__':
  answering.serve(Peer(), {'torch': torch.__version__, 'transformers': transformers.__version__})
