"""A whole evaluation: random weights, real engine, renderer, sandboxes and grader."""

import jax
import pytest

from composer_jax import models
from composer_jax.data import chat, tokenizer
from composer_jax.envs import taskset
from composer_jax.envs.grading import Grader
from composer_jax.envs.sandbox import SandboxPool
from composer_jax.errors import UserError
from composer_jax.evals.runner import evaluate
from composer_jax.rollout.engine import EngineConfig

ENGINE = EngineConfig(slots=4, max_len=128, prefill_buckets=(32,), prefill_tokens=64,
                      cache_views=())


@pytest.fixture(scope='module')
def world():
  tasks = taskset.load(taskset.TasksetConfig(), 'heldout', 3, 4242)
  texts = [task.instruction for task in tasks] * 50 + ['read_file edit_file run_tests finish']
  tok = tokenizer.train(texts, 300)
  model = models.ModelConfig(
      vocab_size=tok.vocab_size, hidden_size=16, num_hidden_layers=2, intermediate_size=16,
      moe_intermediate_size=8, n_routed_experts=4, num_attention_heads=2, kv_lora_rank=8,
      qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
  with SandboxPool(3) as pool, SandboxPool(1) as graders:
    yield model, models.init(model, jax.random.key(0)), tok, tasks, pool, Grader(graders)


def run(world, folder, seed=0, **kwargs):
  model, params, tok, tasks, pool, grader = world
  seen = []
  result = evaluate(model, params, tok, tasks, 4, ENGINE, pool=pool, grader=grader, seed=seed,
                    folder=folder, on_trace=lambda *pair: seen.append(pair), **kwargs)
  return result, seen


def test_rows_traces_and_restart(world, tmp_path):
  result, seen = run(world, tmp_path / 'a')
  assert len(result.rows) == len(seen) == 12
  assert [(r['task_id'], r['sample']) for r in result.rows] == [
      (task.id, sample) for task in world[3] for sample in range(4)]
  assert all(r['valid'] and r['tokens'] > 0 for r in result.rows)
  assert result.summary['tasks'] == 3 and result.summary['samples'] == 12
  assert result.summary['pass_at_1'] == 0.0 and 'best_of_4' in result.summary
  for trace, rollout in seen:
    assert rollout.tokens.tolist() == trace.tokens
    assert rollout.sampled.tolist() == trace.trainable
  # again: nothing is left to do, the same rows; another seed is another evaluation
  again, seen = run(world, tmp_path / 'a')
  assert again == result and not seen
  with pytest.raises(UserError, match='another evaluation'):
    run(world, tmp_path / 'a', seed=1)
  # the same seed elsewhere: the same attempts
  twin, _ = run(world, tmp_path / 'b')
  strip = [{k: v for k, v in row.items() if k != 'wall_s'} for row in twin.rows]
  assert strip == [{k: v for k, v in row.items() if k != 'wall_s'} for row in result.rows]


def test_the_agents_own_words_reach_the_sandbox(world):
  """The renderer that the evaluation uses is the one of the traces."""
  _, _, tok, tasks, _, _ = world
  renderer = chat.Renderer(tok)
  _, seen = run(world, None)
  prompt = [*renderer.user(tasks[0].instruction), *renderer.call_open()]
  texts = [r.tokens[:len(prompt)].tolist() for t, r in seen if t.task_id == tasks[0].id]
  assert texts == [prompt] * 4
