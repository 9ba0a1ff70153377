"""One training step beside transformers': same weights, batch, optimizer and loss, float32.

The model is the 8M-parameter DeepSeek-V3 of `CONFIG`. Our side is the step that `composer-jax run`
trains with. The peer takes the fastest of its expert implementations.
"""

import contextlib
import dataclasses
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax import models
from composer_jax.batch import Batch
from composer_jax.bench import machine, paired
from composer_jax.bench.worker import Worker, peer_script
from composer_jax.checkpoint import names
from composer_jax.errors import InfrastructureError
from composer_jax.models.config import ModelConfig
from composer_jax.train import losses, optimizer
from composer_jax.train import state as state_lib
from composer_jax.train import step as step_lib

CONFIG = ModelConfig(
    vocab_size=4096, hidden_size=256, num_hidden_layers=4, first_k_dense_replace=1,
    intermediate_size=512, moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=4,
    n_shared_experts=1, routed_scaling_factor=2.5, num_attention_heads=4, q_lora_rank=96,
    kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, rms_norm_eps=1e-6,
    max_position_embeddings=2048)
ROWS, LENGTH = 2, 256
# torch.optim.AdamW's defaults; a clip that never acts, because torch's step has none
OPTIMIZER = optimizer.OptimizerConfig(
    lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, clip_norm=1e9, schedule='constant',
    warmup_steps=0)
EXPERT_PATHS = ('grouped_mm', 'eager')  # of transformers; batched_mm copies a weight per token
TOLERANCE = 1e-4  # largest relative gap between the two losses
_TRY_ROUNDS = 3
# Steps that count between two returns to the first weights: after some five steps a near tie in a
# router falls differently in two float32 programs, and the losses part by more than rounding.
_SEGMENT = 3


class Ours:
  """The project's training step on one batch."""

  def __init__(self, config: ModelConfig, rows: int, length: int, seed: int = 0):
    """Draws weights and tokens, and compiles.

    Args:
      config: the model's shape.
      rows: B.
      length: S.
      seed: of weights and tokens.
    """
    self.config = config
    self.tokens = np.random.default_rng(seed).integers(
        0, config.vocab_size, (rows, length), dtype=np.int32)
    self.params = models.init(config, jax.random.key(seed))
    self._batch = _batch(self.tokens)
    self._tx = optimizer.make_optimizer(OPTIMIZER, total_steps=1)
    self._step = step_lib.make_train_step(
        losses.make_lm_loss(config, losses.LossConfig()), self._tx)
    self.losses: list[float] = []
    self.reset()
    start = time.perf_counter()
    jax.block_until_ready(self._step(self._state, self._batch))
    self.compile_s = time.perf_counter() - start  # the first step included
    self.reset()

  def reset(self) -> None:
    """Goes back to the first weights and a fresh optimizer."""
    self._state = state_lib.create(self.params, self._tx)
    self.losses.clear()

  def step(self) -> float:
    """Trains one step; returns its seconds, the transfer of the loss included."""
    start = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    loss = float(metrics['loss'])
    jax.block_until_ready(self._state)
    took = time.perf_counter() - start
    self.losses.append(loss)
    return took

  def loss(self) -> float:
    """Returns the loss of the first weights."""
    self.reset()
    self.step()
    loss = self.losses[0]
    self.reset()
    return loss


class Peer:
  """transformers' step on the same batch, in another interpreter."""

  def __init__(self, worker: Worker, ours: Ours, folder: Path):
    """Hands the weights over in a file with Hugging Face names.

    Args:
      worker: runs `peers/torch_train_step.py`.
      ours: whose weights and tokens to take.
      folder: for the file.
    """
    self._worker = worker
    self._request = {'config': ours.config.to_hf(), 'arrays': str(folder / 'weights.npz'),
                     'threads': machine.threads(), 'lr': OPTIMIZER.lr}
    np.savez(self._request['arrays'], tokens=ours.tokens, **names.to_hf(ours.config, ours.params))
    self.losses: list[float] = []

  def choose(self, experts: str) -> None:
    """Takes this implementation of the experts."""
    self._request['experts'] = experts
    self.reset()

  def reset(self) -> None:
    """Goes back to the first weights and a fresh optimizer."""
    self._worker.ask('load', **self._request)
    self.losses.clear()

  def step(self) -> float:
    """Trains one step; returns its seconds."""
    answer = self._worker.ask('step')
    self.losses.append(answer['loss'])
    return answer['seconds']

  def loss(self) -> float:
    """Returns the loss of the present weights."""
    return self._worker.ask('loss')['loss']


def run(peer_python: str | None, steps: int) -> dict[str, Any]:
  """Measures our step, and the peer's when there is one.

  Args:
    peer_python: an interpreter with torch and transformers, or None.
    steps: rounds that count.

  Returns:
    Everything that `lines` prints, JSON-ready.

  Raises:
    UserError: the interpreter does not do.
    InfrastructureError: the peer failed, or the two do not compute the same losses.
  """
  with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    worker = peer_python and stack.enter_context(
        Worker(peer_python, peer_script('torch_train_step'), machine.threads()))
    ours = Ours(CONFIG, ROWS, LENGTH)
    facts = {'target': 'train_step', 'machine': machine.describe() | machine.gemm_rate(None),
             'config': dataclasses.asdict(CONFIG), 'rows': ROWS, 'length': LENGTH,
             'optimizer': dataclasses.asdict(OPTIMIZER), 'steps': steps,
             'warm_ups': paired.WARM_UPS, 'steps_between_resets': paired.WARM_UPS + _SEGMENT,
             'parameters': sum(p.size for p in jax.tree.leaves(ours.params)),
             'useful_gflop': useful_flops(CONFIG, ROWS, LENGTH) / 1e9}
    if worker is None:
      facts['ours'] = paired.summary(paired.interleave({'ours': ours.step}, steps)['ours'])
    else:
      peer = Peer(worker, ours, folder)
      facts['peer_paths'], facts['peer_paths_failed'] = try_paths(peer)
      fastest = min(facts['peer_paths'], key=facts['peer_paths'].get)
      peer.choose(fastest)
      facts |= compare(ours, peer, steps)
      facts['peer'] |= worker.about | {'experts': fastest, 'attention': 'sdpa'}
      facts['machine'] |= machine.gemm_rate(worker)
    facts['ours']['compile_s'] = ours.compile_s
    for side in ('ours', 'peer'):
      if side in facts:
        facts[side] |= _rates(facts, facts[side]['median_ms'])
  return facts


def try_paths(peer: Peer) -> tuple[dict[str, float], dict[str, str]]:
  """Tries each expert implementation that the peer has.

  Each gets two turns, A B B A, because the machine may be slower in one of them; one that fails in
  either is out of the choice.

  Returns:
    The fastest step in milliseconds of each that runs, and one line of text for each that fails.

  Raises:
    InfrastructureError: none of them runs.
  """
  found: dict[str, float] = {}
  failed: dict[str, str] = {}
  for experts in (*EXPERT_PATHS, *reversed(EXPERT_PATHS)):
    if experts in failed:
      continue
    try:
      peer.choose(experts)
      seconds = paired.interleave({experts: peer.step}, _TRY_ROUNDS)[experts]
    except InfrastructureError as error:
      failed[experts] = textwrap.shorten(str(error), 300, placeholder=' ...')
      found.pop(experts, None)
      continue
    found[experts] = min(found.get(experts, float('inf')), 1e3 * min(seconds))
  if not found:
    raise InfrastructureError('none of the peer\'s expert implementations runs: ' + '; '.join(
        f'{experts}: {error}' for experts, error in failed.items()))
  return found, failed


def compare(ours: Ours, peer: Peer, steps: int) -> dict[str, Any]:
  """Times both sides in turn, and checks that they compute the same.

  Both go back to the first weights every `_SEGMENT` steps; the warm-ups after that do not count.

  Args:
    ours: this side.
    peer: the other side.
    steps: that count.

  Returns:
    Summaries of both, their paired ratio, all seconds, the losses and the largest gap.

  Raises:
    InfrastructureError: a pair of losses is further apart than `TOLERANCE`.
  """
  before = {'ours': ours.loss(), 'peer': peer.loss()}
  gaps = [_same_loss('before the first step', **before)]
  sides = {'ours': ours.step, 'peer': peer.step}
  seconds: dict[str, list[float]] = {name: [] for name in sides}

  def check() -> None:
    where = f'in step {len(ours.losses)} from the first weights'
    gaps.append(_same_loss(where, ours.losses[-1], peer.losses[-1]))

  while (left := steps - len(seconds['ours'])) > 0:
    ours.reset()
    peer.reset()
    part = paired.interleave(sides, min(_SEGMENT, left), after_round=check)
    for name, values in part.items():
      seconds[name] += values
  return {'loss_before': before, 'loss_after': {'ours': ours.losses[-1], 'peer': peer.losses[-1]},
          'loss_gap_max': max(gaps), 'ours': paired.summary(seconds['ours']),
          'peer': paired.summary(seconds['peer']),
          'ratio': paired.ratio(seconds['ours'], seconds['peer']),
          'seconds': seconds}


def useful_flops(config: ModelConfig, rows: int, length: int) -> float:
  """Returns the floating-point operations of one step's matrix products, forward and backward.

  Every weight that a token meets counts twice (multiply, add) and once more for each of the two
  gradients; attention counts the half of the score matrix that causality leaves. Embedding, norms,
  softmax and optimizer are left out.
  """
  shapes = jax.eval_shape(lambda: models.init(config, jax.random.key(0)))
  share, weights = config.num_experts_per_tok / config.n_routed_experts, 0.0
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name.endswith(('norm', 'bias', 'embed')):
      continue
    weights += leaf.size * (share if '/experts_' in name else 1.0)
  pairs = length * (length + 1) / 2
  attention = config.num_hidden_layers * config.num_attention_heads * pairs * (
      config.qk_head_dim + config.v_head_dim)
  return 3 * 2 * rows * (weights * length + attention)


def lines(facts: dict[str, Any]) -> list[str]:
  """Returns the report as text."""
  m = facts['machine']
  out = [f'train step: {facts["parameters"] / 1e6:.2f} M parameters, B {facts["rows"]} x S '
         f'{facts["length"]}, float32, AdamW, full logits, '
         f'{facts["useful_gflop"]:.1f} useful GFLOP',
         *machine.lines(m)]
  if 'peer' in facts:
    peer = facts['peer']
    tried = ', '.join(f'{name} {ms:.0f} ms' for name, ms in facts['peer_paths'].items())
    out += [f'peer: transformers {peer["transformers"]}, torch {peer["torch"]}, experts '
            f'{peer["experts"]} (fastest of {tried}), attention {peer["attention"]}',
            *(f'peer: experts {name} failed and were left out: {error}'
              for name, error in facts['peer_paths_failed'].items()),
            f'losses: before {facts["loss_before"]["ours"]:.6f} ours, '
            f'{facts["loss_before"]["peer"]:.6f} peer; after the last steps '
            f'{facts["loss_after"]["ours"]:.6f}, {facts["loss_after"]["peer"]:.6f}; largest '
            f'relative gap of any step {facts["loss_gap_max"]:.1e}']
  out.append(f'{"":6} {"compile s":>10} {"min ms":>8} {"median ms":>10} {"tokens/s":>9} '
             f'{"GFLOP/s":>8} {"of GEMM rate":>13}')
  for side in ('ours', 'peer'):
    if side in facts:
      f = facts[side]
      compiled = f'{f["compile_s"]:.1f}' if 'compile_s' in f else '-'
      out.append(f'{side:6} {compiled:>10} {f["min_ms"]:8.1f} {f["median_ms"]:10.1f} '
                 f'{f["tokens_per_s"]:9.0f} {f["gflops_per_s"]:8.1f} {f["of_gemm_rate"]:13.2f}')
  if 'ratio' in facts:
    out.append(f'ours / peer, {facts["steps"]} interleaved steps: {paired.text(facts["ratio"])}')
  return out


def _batch(tokens: np.ndarray) -> Batch:
  """Returns rows of one document each as a single micro-batch; the last token predicts nothing."""
  rows, length = tokens.shape
  weights = np.ones((rows, length), np.float32)
  weights[:, -1] = 0
  batch = Batch(
      tokens=tokens, targets=np.pad(tokens[:, 1:], ((0, 0), (0, 1))), weights=weights,
      positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
      segment_ids=np.ones((rows, length), np.int32), denominator=float(weights.sum()))
  return jax.tree.map(jnp.asarray, step_lib.micro_batches(batch))


def _same_loss(where: str, ours: float, peer: float) -> float:
  gap = abs(ours - peer) / max(abs(peer), 1e-30)
  if not gap <= TOLERANCE:
    raise InfrastructureError(
        f'not the same computation: {where} the loss is {ours:.7g} here and {peer:.7g} in the '
        f'peer, a relative gap of {gap:.1e} (limit {TOLERANCE:.0e}); no ratio is given')
  return gap


def _rates(facts: dict[str, Any], median_ms: float) -> dict[str, float]:
  rate = facts['useful_gflop'] / (median_ms / 1e3)
  return {'tokens_per_s': facts['rows'] * facts['length'] / (median_ms / 1e3),
          'gflops_per_s': rate, 'of_gemm_rate': rate / facts['machine']['gemm_gflops_per_s']}
