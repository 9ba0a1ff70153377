"""The whole Composer 2 recipe with a 0.8M-parameter model, for two CPU cores.

    composer-jax run --config=experiments/tiny/composer2.py --workdir=runs/tiny

Continued pretraining on the code of this machine and on clean functions, a phase with rows twice
as long, SFT on demonstrations that a scripted expert gives in the sandbox, and asynchronous RL on
tasks with one injected bug each, evaluated on held-out tasks before and after. Budgets are steps,
not seconds, so that the result does not depend on the load of the machine.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the config of the demo."""
  config = ConfigDict()
  config.seed = 0
  config.model = model()
  config.data = data()
  config.functions = {'train_documents': 12_000, 'heldout_documents': 600}
  config.cpt = pretraining(steps=360, seq_len=128, batch_size=8)
  config.cpt.optimizer = {'lr': 3e-3, 'warmup_steps': 30, 'final_fraction': 0.3}
  config.long_context = pretraining(steps=80, seq_len=256, batch_size=4)
  config.long_context.optimizer = {'lr': 9e-4, 'warmup_steps': 5, 'final_fraction': 0.1}
  config.long_context.rope_factor = 2.0
  config.long_context.loss = {'mtp_weight': 0.1}  # MTP joins midway, as in the report
  config.sft = sft(steps=460)
  config.traces = {'count': 2_000, 'concurrency': 8, 'expert': {'idle_edit_rate': 0.3}}
  # what the expert needs when its first edit is wrong: read, edit, test, two edits, test, finish
  config.tasks = {'level': 'l0', 'l0': {'limits': {'max_calls': 7}}}
  config.sampler = {'slots': 64, 'max_len': 256, 'decode_rows': (32,), 'cache_views': (128,)}
  config.rl = rl(steps=72, lr=4e-4, warmup_steps=12, kl_coefficient=0.03)
  # without it RL may discover that `finish` right after an edit is right now and then, and for
  # twenty steps do little else
  config.rl.behaviour = {'untested_finish': -0.2}
  config.eval = {'tasks': 200, 'samples_per_task': 8, 'seed': 4242}
  config.lock()
  return config


def ablation() -> ConfigDict:
  """Returns the demo's config with less SFT and RL and a smaller evaluation: for ablations."""
  config = get_config()
  config.sft.update(sft(steps=280))
  config.rl.steps = 50
  config.eval.samples_per_task = 4
  return config


def model() -> dict:
  """Returns the shape: every part of Kimi K2.5, small."""
  return {
    'vocab_size': 512, 'hidden_size': 96, 'num_hidden_layers': 3, 'first_k_dense_replace': 1,
    'intermediate_size': 288, 'moe_intermediate_size': 48, 'n_routed_experts': 8,
    'num_experts_per_tok': 2, 'n_shared_experts': 1, 'num_attention_heads': 4, 'q_lora_rank': 0,
    'kv_lora_rank': 64, 'qk_nope_head_dim': 32, 'qk_rope_head_dim': 16, 'v_head_dim': 32,
    'rope_theta': 1000.0, 'max_position_embeddings': 128, 'num_nextn_predict_layers': 1,
    'initializer_range': 0.08, 'scan_unroll': 2}


def data() -> dict:
  """Returns the corpus: code that is on every machine that can run this."""
  return {
    'vocab_size': 512,
    'sources': {'stdlib': {'kind': 'stdlib', 'max_bytes': 4_000_000},
                'packages': {'kind': 'packages', 'max_bytes': 2_000_000}},
    'tokenizer_bytes': 1_200_000, 'heldout_bytes': 60_000,
    'tokenizer_weights': {'stdlib': 0.5, 'packages': 0.25, 'functions': 2.0, 'samples': 4.0}}


def pretraining(steps: int, seq_len: int, batch_size: int) -> dict:
  """Returns a pretraining phase without its rates; the second goes on where the first one's end.

  Clean functions are two thirds of the rows: at this size they, and not the standard library, are
  what later stages profit from (see experiments/LOG.md).
  """
  return {
    'steps': steps, 'seq_len': seq_len, 'batch_size': batch_size,
    'mixture': {'functions': 0.67, 'stdlib': 0.22, 'packages': 0.11},
    'eval_every': 120, 'eval_max_bytes': 30_000, 'checkpoint_every': 120}


def sft(steps: int) -> dict:
  """Returns the SFT stage, stopped early on purpose: more of it helps, and so does RL."""
  return {
    'steps': steps, 'seq_len': 256, 'batch_size': 4, 'context_weight': 0.1,
    'optimizer': {'lr': 3e-3, 'warmup_steps': 30, 'final_fraction': 0.1},
    'eval_every': steps // 2, 'checkpoint_every': 150}


def rl(steps: int, lr: float, warmup_steps: int, kl_coefficient: float) -> dict:
  """Returns the RL stage.

  A slow warm-up, the long memory of the second moment and the KL to SFT keep the first, noisy steps
  from costing the policy what it can only sometimes do; the fewer the steps, the less of it pays
  (see experiments/LOG.md).
  """
  return {
    'steps': steps, 'groups_per_step': 12, 'group_size': 8, 'max_staleness': 1,
    'optimizer': {'lr': lr, 'b2': 0.99, 'warmup_steps': warmup_steps, 'final_fraction': 0.2},
    'kl_coefficient': kl_coefficient, 'row_len': 352, 'rows_per_micro_batch': 5,
    'checkpoint_every': 20}
