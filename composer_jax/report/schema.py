"""The files that the report reads; whoever writes a run folder writes these.

`config.json`      {"config": {...}, "fingerprint": "...", "version": {...}}
`results.json`     {"stages": {name: {"bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte",
                   "heldout_loss", "wall_s", ...}}, "eval": {name: {"pass_at_1", "ci95": [lo, hi],
                   "best_of_8", "tasks", ...}}, "wall_s", "peak_rss_gb"}
`stages/STAGE/summary.json`   numbers at the end of a stage (any keys; `wall_s` is used), with
                   "sources": {SOURCE: {"gzip_bits_per_byte", "xz_bits_per_byte"}} where held-out
                   files are compressed
`data/manifest.json`          "sources" in the same form, for a stage that has not finished
`stages/STAGE/metrics.jsonl`  rows {"step": int, "NAME": value, ...}, see `composer_jax.metrics`.
  Any metric is drawn; those of `curves.CHARTS` have a chart of their own, for instance
    loss                          training loss
    eval/bits_per_byte/SOURCE     at every evaluation of pretraining
    eval/heldout_loss             at every evaluation of SFT: nats per model token
    reward_mean, solved_fraction, reward/PART, success/CLASS, tokens_per_episode, entropy, kl,
    staleness_mean, staleness_max, gap_max, gap_p99, gap_mean, lr, grad_norm, ...
`stages/eval_NAME/rows.jsonl` one row a task and sample: {"task_id", "sample", "reward",
                   "stop_reason", "tokens", "calls", "mutation"}
`stages/STAGE/traces.jsonl`   see `rollout_viewer`
`stages/sft/demonstrations.jsonl`, `data/tokenizer.json`   see `demonstrations`
"""

STAGE_ORDER = ('data', 'cpt', 'long_context', 'sft', 'eval_sft', 'rl', 'eval_rl')
