import hashlib
import json
from array import array

import pytest

from composer_jax.data.chat import flatten, render_segments
from composer_jax.envs.harness import Episode, Status
from composer_jax.envs.types import Case, FailureClass, Limits, StopReason, Task, Trace
from composer_jax.errors import InfrastructureError

CASE = Case('main', 'f()', '1')
TASK = Task(id='t', level='l0', instruction='fix f: one',
            files={'main.py': 'def f():\n  return 2\n'}, visible=[CASE], hidden=[CASE],
            entry='main.py', solution={'main.py': 'def f():\n  return 1\n'})


@pytest.fixture
def start(renderer, fake_sandbox, fake_grader):
  def make(limits=None, verdict=True, task=TASK, **sandbox):
    released = []
    episode = Episode(task, fake_sandbox(**sandbox), fake_grader(verdict), renderer, limits,
                      group_id='g', sample_index=2, release=released.append)
    episode.released = released
    return episode
  return make


def say(episode, renderer, *texts):
  """Plays whole turns; returns the last status."""
  for text in texts:
    assert episode.poll() == Status.READY
    episode.next_tokens()
    episode.deliver(renderer.call(text), True)
  return episode.poll()


def sampled(trace):
  return sum(trace.trainable)


def test_finished_and_solved(start, renderer):
  episode = start()
  calls = ('read_file', 'edit_file 2|return 1', 'run_tests', 'finish')
  assert say(episode, renderer, *calls) == Status.DONE == 'done'
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.valid) == (StopReason.FINISHED, 1.0, True)
  assert trace.failure is None
  assert [t.result.text for t in trace.turns[:3]] == ['1|def f():\n2|  return 2', 'ok', 'pass']
  assert trace.diff == {'main.py': 'def f():\n  return 1\n'}
  assert episode.id == 'g/2'
  assert len(episode.released) == 1


def test_live_tokens_equal_the_rendered_trace(start, renderer):
  episode = start(reprs=('<|end|>',))
  say(episode, renderer, 'read_file', 'nonsense <|end|>', 'edit_file 2|return 1', 'run_tests',
      'finish')
  trace = episode.trace()
  turns = [(t.text, t.result.text if t.result else None) for t in trace.turns]
  ids, mask = flatten(render_segments(renderer, TASK.instruction, turns))
  assert (trace.tokens, trace.trainable) == (ids, mask)


def test_mask_is_exactly_the_model_bodies_with_their_end(start, renderer):
  episode = start()
  say(episode, renderer, 'read_file', 'edit_file 2|return 1', 'finish')
  trace = episode.trace()
  owned = [i for i, flag in enumerate(trace.trainable) if flag]
  spans = [i for t in trace.turns for i in range(*t.call_span)]
  assert owned == spans
  for turn in trace.turns:
    first, last = turn.call_span
    assert trace.tokens[first - 1] == renderer.tokenizer.call_id
    assert trace.tokens[last - 1] == renderer.end_id
    assert trace.tokens[first:last] == renderer.call(turn.text)


def test_context_hash_is_of_everything_before_the_turn(start, renderer):
  episode = start()
  say(episode, renderer, 'read_file', 'run_tests', 'finish')
  trace = episode.trace()
  for turn, recorded in zip(trace.turns, trace.context_hashes, strict=True):
    before = array('I', trace.tokens[:turn.call_span[0]]).tobytes()
    assert hashlib.blake2b(before, digest_size=8).hexdigest() == recorded


def test_finished_but_wrong(start, renderer):
  episode = start(verdict=False)
  say(episode, renderer, 'finish')
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.failure) == (
    StopReason.FINISHED, 0.0, FailureClass.AGENT)
  assert trace.parts['untested_finish'] == 1


def test_max_calls(start, renderer):
  episode = start(limits=Limits(max_calls=2))
  assert say(episode, renderer, 'read_file', 'read_file') == Status.DONE
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.failure) == (
    StopReason.MAX_CALLS, 0.0, FailureClass.BUDGET)
  assert sampled(trace) == 2 * len(renderer.call('read_file'))
  assert trace.turns[-1].result is not None


def test_finish_as_the_last_allowed_call_counts(start, renderer):
  episode = start(limits=Limits(max_calls=2))
  say(episode, renderer, 'read_file', 'finish')
  assert episode.trace().reward == 1.0


def cut_turn(episode, renderer, count):
  assert episode.poll() == Status.READY
  episode.next_tokens()
  tokens = (renderer.call('edit_file 2|return 1') * 20)[:count]
  episode.deliver(tokens, False)


def test_turn_cut_is_not_parsed_as_a_call(start, renderer):
  episode = start(limits=Limits(max_turn_tokens=6))
  assert episode.poll() == Status.READY
  assert episode.max_new_tokens() == 6
  cut_turn(episode, renderer, 6)
  assert episode.poll() == Status.DONE
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.failure) == (
    StopReason.TURN_CUT, 0.0, FailureClass.BUDGET)
  assert trace.turns[0].call is None
  assert not trace.turns[0].ended
  assert sampled(trace) == 6


def test_token_budget_cuts_a_turn(start, renderer):
  prompt = len(renderer.user(TASK.instruction)) + 1
  episode = start(limits=Limits(max_tokens=prompt + 4))
  episode.poll()
  assert episode.max_new_tokens() == 4
  cut_turn(episode, renderer, 4)
  assert episode.trace().stop_reason == StopReason.MAX_TOKENS
  assert episode.trace().reward == 0.0


def test_token_budget_leaves_no_room_after_a_result(start, renderer):
  prompt = len(renderer.user(TASK.instruction)) + 1
  episode = start(limits=Limits(max_tokens=prompt + len(renderer.call('read_file')) + 3))
  assert say(episode, renderer, 'read_file') == Status.DONE
  trace = episode.trace()
  assert trace.stop_reason == StopReason.MAX_TOKENS
  assert len(trace.tokens) <= prompt + len(renderer.call('read_file')) + 3


def test_prompt_larger_than_the_budget_ends_at_once(start):
  episode = start(limits=Limits(max_tokens=3))
  assert episode.poll() == Status.DONE
  assert episode.trace().stop_reason == StopReason.MAX_TOKENS


def test_context_full_mid_turn_wins_over_the_cut(start, renderer):
  episode = start()
  cut_turn(episode, renderer, 3)
  episode.abort('context_full')
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.failure) == (
    StopReason.CONTEXT_FULL, 0.0, FailureClass.BUDGET)


def test_shutdown_is_no_verdict(start, renderer):
  episode = start()
  cut_turn(episode, renderer, 3)
  episode.abort('shutdown')
  assert episode.poll() == Status.DONE
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.valid) == (StopReason.ABORTED, None, False)
  waiting = start()
  waiting.abort('shutdown')
  assert waiting.trace().reward is None


def test_shutdown_after_a_verdict_does_not_take_it_back(start, renderer):
  episode = start()
  say(episode, renderer, 'finish')
  episode.abort('shutdown')
  assert episode.trace().reward == 1.0


@pytest.mark.parametrize('sandbox', [
  {'breaks': 'reset'}, {'breaks': 'read_file'}, {'malformed': 'read_file'}])
def test_broken_sandbox_is_never_a_zero(start, renderer, sandbox):
  episode = start(**sandbox)
  if episode.poll() == Status.READY:
    episode.next_tokens()
    episode.deliver(renderer.call('read_file'), True)
  assert episode.poll() == Status.DONE
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.valid, trace.failure) == (
    StopReason.INFRASTRUCTURE, None, False, FailureClass.INFRA)
  assert trace.error
  assert len(episode.released) == 1


def test_broken_grader_is_never_a_zero(start, renderer):
  episode = start(verdict=InfrastructureError('no grader'))
  assert say(episode, renderer, 'finish') == Status.DONE
  assert episode.trace().reward is None
  assert episode.trace().stop_reason == StopReason.INFRASTRUCTURE


def test_memory_hog_is_the_agents_fault(start, renderer):
  error = InfrastructureError('killed')
  error.out_of_memory = True
  episode = start(verdict=error)
  say(episode, renderer, 'finish')
  trace = episode.trace()
  assert (trace.stop_reason, trace.reward, trace.failure) == (
    StopReason.CRASHED, 0.0, FailureClass.AGENT)


def test_all_stop_reasons_are_distinct():
  assert len({s.value for s in StopReason}) == len(StopReason) == 8


def test_bad_calls_are_answered_and_counted(start, renderer):
  episode = start()
  say(episode, renderer, 'fly', 'edit_file 9|x', 'edit_file 2|return 2', 'finish')
  trace = episode.trace()
  assert [t.result.text for t in trace.turns[:3]] == [
    'error: unknown tool', 'error: no line 9', 'no change']
  assert trace.parts['call_errors'] == 2
  assert trace.parts['no_change_edits'] == 1
  assert trace.parts['edits'] == 2


def test_failing_test_text_and_parts_by_hand(start, renderer):
  episode = start(reprs=('7',))
  say(episode, renderer, 'run_tests', 'finish')
  trace = episode.trace()
  assert trace.turns[0].result.text == 'fail f() got 7 want 1'
  parts = trace.parts
  assert parts['call_tokens'] == len(renderer.call('run_tests'))
  assert parts['final_tokens'] == len(renderer.call('finish'))
  assert parts['result_tokens'] == len(renderer.result('fail f() got 7 want 1'))
  assert parts['prompt_tokens'] == len(renderer.user(TASK.instruction))
  assert (parts['calls'], parts['turns'], parts['test_runs']) == (2, 2, 1)
  assert parts['prompt_tokens'] + 2 + sum(
    parts[n] for n in ('call_tokens', 'final_tokens', 'result_tokens')) == len(trace.tokens)


def test_protected_files_are_restored_and_not_editable(start, renderer):
  task = Task(**{**TASK.__dict__, 'files': {**TASK.files, 'tests.txt': 'a\n'},
                 'protected': ('tests.txt',)})
  episode = start(task=task)
  say(episode, renderer, 'edit_file tests.txt:1|b')
  episode._sandbox.files['tests.txt'] = 'changed by code'
  episode._sandbox.files['sitecustomize.py'] = 'import os'
  say(episode, renderer, 'finish')
  assert episode.trace().turns[0].result.text == 'error: path not allowed'
  assert episode._grader.graded[0][0] == {**TASK.files, 'tests.txt': 'a\n'}


def test_long_results_are_cut(start, renderer):
  task = Task(**{**TASK.__dict__, 'files': {'main.py': 'x = 1\n' * 500}})
  episode = start(task=task, limits=Limits(output_bytes=100, max_tokens=4096))
  say(episode, renderer, 'read_file')
  assert len(episode.turns[0].result.text) < 110
  assert episode.turns[0].result.text.endswith('[cut]')


def test_trace_survives_json(start, renderer):
  episode = start()
  say(episode, renderer, 'read_file', 'oops', 'finish')
  trace = episode.trace()
  assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_calls_out_of_order_are_programming_errors(start):
  episode = start()
  with pytest.raises(RuntimeError):
    episode.deliver([1], True)
  episode.poll()
  episode.next_tokens()
  with pytest.raises(RuntimeError):
    episode.next_tokens()
  with pytest.raises(RuntimeError):
    episode.trace()
