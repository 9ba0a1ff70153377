"""Peer of `composer-jax bench kernels --op=grouped_matmul`: torch._grouped_mm.

Runs in an interpreter of its own that has torch and NumPy, and needs nothing else. It says
{"torch": VERSION}, then reads one JSON object a line from standard input and answers each with one
on standard output:

  {"do": "load", "arrays": FILE.npz, "threads": N} -> {}       of x [M, K], w [E, K, N], dy, sizes
  {"do": "forward"} -> {"seconds": X}
  {"do": "forward_backward"} -> {"seconds": X}                 gradients of x and w for dy
  {"do": "results", "arrays": FILE.npz} -> {}                  writes y, dx, dw of the last call
  {"do": "gemm", "size": N} -> {"seconds": X}                  one dense float32 product

An error becomes {"error": TEXT}. The end of standard input ends it.
"""

import time

import answering  # beside this script
import numpy as np
import torch


class Peer(answering.Answerer):
  """One problem at a time."""

  def __init__(self):
    self.x = self.w = self.dy = self.offsets = self.y = None

  def load(self, message):
    """Reads a problem."""
    torch.set_num_threads(message['threads'])
    with np.load(message['arrays']) as arrays:
      self.x = torch.from_numpy(arrays['x']).requires_grad_()
      self.w = torch.from_numpy(arrays['w']).requires_grad_()
      self.dy = torch.from_numpy(arrays['dy'])
      self.offsets = torch.from_numpy(np.cumsum(arrays['sizes']).astype(np.int32))
    return {}

  def forward(self, unused_message):
    """Times the products."""
    start = time.perf_counter()
    with torch.no_grad():
      self.y = torch._grouped_mm(self.x, self.w, offs=self.offsets)
    return {'seconds': time.perf_counter() - start}

  def forward_backward(self, unused_message):
    """Times the products and both gradients."""
    start = time.perf_counter()
    self.x.grad = self.w.grad = None
    self.y = torch._grouped_mm(self.x, self.w, offs=self.offsets)
    self.y.backward(self.dy)
    return {'seconds': time.perf_counter() - start}

  def results(self, message):
    """Writes what `forward_backward` computed."""
    np.savez(message['arrays'], y=self.y.detach().numpy(), dx=self.x.grad.numpy(),
             dw=self.w.grad.numpy())
    return {}


if __name__ == '__main__':
  answering.serve(Peer(), {'torch': torch.__version__})
