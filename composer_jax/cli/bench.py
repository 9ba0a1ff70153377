"""`composer-jax bench`: figures beside those of other software."""

from absl import flags

from composer_jax.cli import arguments
from composer_jax.errors import UserError

HELP = """
usage: composer-jax bench train_step|kernels [--peer_python=PYTHON] [--steps=20] [--json=FILE]
                          [--ops=grouped_matmul]
       composer-jax bench kernels --compile_only [--targets=h200,b200] [--ops=grouped_matmul]

train_step: one training step of an 8M-parameter model (float32, AdamW, full logits) beside
transformers' DeepseekV3ForCausalLM with the same weights and batch. kernels: every op on every
backend that can run here, checked, then timed; shapes of Kimi K2.5 on an accelerator. On a CPU also
the grouped matmul at three shapes beside torch._grouped_mm, jax.lax.ragged_dot and one dense
product of the same size. Beside a peer, both sides are timed in turn in one run, and the ratio is
that of neighbouring times.

--peer_python names another interpreter that has torch (and transformers, for train_step), e.g. one
made by `python -m venv peer && peer/bin/pip install torch transformers`; without it only this
side is measured.

--compile_only compiles every GPU and TPU kernel for devices that are not here, and prints what each
takes of them.
"""


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the verb's flags."""
  arguments.define_json(flag_values)
  flags.DEFINE_string('peer_python', None, 'Interpreter with torch and transformers.',
                      flag_values=flag_values)
  flags.DEFINE_integer('steps', 20, 'Interleaved rounds that count, after two that do not.',
                       flag_values=flag_values)
  flags.DEFINE_boolean('compile_only', False, 'Compile `kernels` for --targets, run nothing.',
                       flag_values=flag_values)
  flags.DEFINE_list('targets', [], 'Devices to compile for; all by default.',
                    flag_values=flag_values)
  flags.DEFINE_list('ops', [], 'Ops to time or compile; all by default.', flag_values=flag_values)


def main(args: arguments.Arguments) -> None:
  """Runs the verb."""
  args.no_config()
  target = args.action({'train_step': _train_step, 'kernels': _kernels})
  if args.flags.steps < 1:
    raise UserError(f'--steps={args.flags.steps}: has to be at least 1')
  target(args)


def _train_step(args: arguments.Arguments) -> None:
  from composer_jax.bench import train_step
  facts = train_step.run(args.flags.peer_python, args.flags.steps)
  print('\n'.join(train_step.lines(facts)))
  args.write_json(facts)


def _kernels(args: arguments.Arguments) -> None:
  if args.flags.compile_only:
    from composer_jax.bench import compiled
    compiled.run(args.flags.targets, args.flags.ops, show=print, write=args.write_json)
    return
  if args.flags.targets:
    raise UserError('bench kernels: --targets goes with --compile_only')
  from composer_jax.bench import kernels, ops
  facts = ops.run(args.flags.ops, args.flags.steps, show=print)
  if facts['small'] and (not args.flags.ops or 'grouped_matmul' in args.flags.ops):
    facts['grouped_matmul'] = kernels.run(args.flags.peer_python, args.flags.steps, show=print)
  args.write_json(facts)
