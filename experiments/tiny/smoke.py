"""The whole recipe in about a minute: every stage is real, nothing in it learns much.

    composer-jax run --config=experiments/tiny/smoke.py --workdir=runs/smoke

For tests, notebooks and a first look at what a run folder holds. The model is the demo's in shape
and far too small to solve a task, so RL takes groups whose shaped rewards differ for a signal.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the config of the smoke run."""
  config = ConfigDict()
  config.seed = 0
  config.model = {
    'vocab_size': 384, 'hidden_size': 32, 'num_hidden_layers': 2, 'first_k_dense_replace': 1,
    'intermediate_size': 64, 'moe_intermediate_size': 16, 'n_routed_experts': 8,
    'num_experts_per_tok': 2, 'n_shared_experts': 1, 'num_attention_heads': 2, 'q_lora_rank': 0,
    'kv_lora_rank': 16, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 8, 'v_head_dim': 16,
    'rope_theta': 1000.0, 'max_position_embeddings': 128, 'num_nextn_predict_layers': 1,
    'initializer_range': 0.08}
  config.data = {
    'vocab_size': 384, 'sources': {'stdlib': {'kind': 'stdlib', 'max_bytes': 800_000}},
    'tokenizer_bytes': 150_000, 'heldout_fraction': 0.2, 'heldout_bytes': 60_000}
  config.functions = {'train_documents': 400, 'heldout_documents': 60}
  config.cpt = training(steps=24, seq_len=64, batch_size=4, eval_every=12)
  config.cpt.mixture = {'functions': 0.7, 'stdlib': 0.3}
  config.long_context = training(steps=40, seq_len=256, batch_size=2, eval_every=20)
  config.long_context.mixture = {'functions': 0.7, 'stdlib': 0.3}
  config.long_context.rope_factor = 2.0
  config.sft = training(steps=40, seq_len=256, batch_size=2, eval_every=20)
  for stage in (config.long_context, config.sft):  # equal programs: compiled once for both
    stage.loss = {'mtp_weight': 0.1}
  config.traces = {'count': 24, 'heldout': 6, 'concurrency': 4}
  config.tasks = {'level': 'l0'}
  config.sampler = {'slots': 8, 'max_len': 256, 'prefill_buckets': (32,), 'cache_views': ()}
  config.rl = {
    'steps': 4, 'groups_per_step': 2, 'group_size': 4, 'zero_signal': 'shaped',
    'length_penalty': {'scope': 'all'}, 'rows_per_micro_batch': 4,
    'optimizer': {'lr': 5e-4, 'warmup_steps': 1}, 'checkpoint_every': 2, 'trace_every': 1}
  config.eval = {'tasks': 3, 'samples_per_task': 8, 'seed': 4242, 'bootstrap_samples': 200}
  config.grading_sandboxes = 2
  config.lock()
  return config


def training(steps: int, seq_len: int, batch_size: int, eval_every: int) -> ConfigDict:
  """Returns a supervised stage with a metrics row for every step."""
  return ConfigDict({
    'steps': steps, 'seq_len': seq_len, 'batch_size': batch_size,
    'optimizer': {'lr': 8e-3, 'warmup_steps': 4}, 'log_every': 1, 'eval_every': eval_every,
    'eval_max_bytes': 4_000, 'checkpoint_every': 4})
