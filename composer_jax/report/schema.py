"""The files that the report reads; whoever writes a run folder writes these.

`config.json`      {"config": {...}, "fingerprint": "...", "version": {...}}
`results.json`     {"stages": {name: {"bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte",
                   "wall_s", ...}}, "eval": {name: {"pass_at_1", "ci95": [lo, hi], "best_of_8",
                   "tasks", ...}}, "wall_s", "peak_rss_gb"}
`stages/STAGE/summary.json`   numbers at the end of a stage (any keys; `wall_s` is used)
`stages/STAGE/metrics.jsonl`  rows {"step": int, "NAME": value, ...}, see `composer_jax.metrics`.
  Any metric is drawn; those of `curves.CHARTS` have a chart of their own, for instance
    loss                          training loss
    heldout/SOURCE/bits_per_byte  at every evaluation
    gzip/SOURCE/bits_per_byte     constants of the held-out files of that source
    xz/SOURCE/bits_per_byte
    reward, eval/pass_at_1, eval/ci95_lo, eval/ci95_hi, entropy, kl, staleness_mean, staleness_max,
    logprob_gap_max, logprob_gap_p99, logprob_gap_mean, response_tokens, ...
`stages/eval_NAME/rows.jsonl` one row a task and sample: {"task_id", "sample", "reward",
                   "stop_reason", "tokens", "calls", "mutation"}
`stages/STAGE/traces.jsonl`   see `rollout_viewer`
"""

STAGE_ORDER = ('data', 'cpt', 'long_context', 'sft', 'eval_sft', 'rl', 'eval_rl')
