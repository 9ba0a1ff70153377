"""Sampled ids to calls: marks count as ids only, and nothing a model writes raises."""

import random
import re

import pytest

from composer_jax.data import kimi_parse
from composer_jax.data.kimi_parse import BadCall, ToolCall

SHORT = {'«': '<|tool_calls_section_begin|>', '»': '<|tool_calls_section_end|>',
         '[': '<|tool_call_begin|>', '|': '<|tool_call_argument_begin|>', ']': '<|tool_call_end|>',
         '(': '<think>', ')': '</think>', '.': '<|im_end|>', '@': '<|im_user|>'}


@pytest.fixture(name='parse')
def _parse(kimi):
  """A function of text in which the keys of SHORT stand for special ids, `~` escapes them."""
  def parse(text, **options):
    ids = []
    for piece in re.findall(r'~.|[«»\[\]|().@]|[^~«»\[\]|().@]+', text):
      ids += [kimi.special(SHORT[piece])] if piece in SHORT else kimi.encode(piece.lstrip('~'))
    return kimi_parse.parse(kimi, ids, **options)
  return parse


def _kinds(turn):
  calls = [c.name if isinstance(c, ToolCall) else c.kind for c in turn.calls]
  return calls, [p.kind for p in turn.problems], turn.ended


def test_parallel_calls_in_order(parse):
  turn = parse('Look first)I look«[functions~.read:0|{"path": "a"}] \n[list:1|{}]».',
               in_reasoning=True)
  assert turn == kimi_parse.Turn(
      'Look first', 'I look',
      (ToolCall('functions.read:0', 'read', {'path': 'a'}, '{"path": "a"}'),
       ToolCall('list:1', 'list', {}, '{}')), (), True)


@pytest.mark.parametrize(('text', 'calls', 'problems', 'ended'), [
    ('hi.', [], [], True),
    ('hi', [], [], False),
    ('', [], [], False),
    ('«[f:0|{}]».', ['f'], [], True),
    ('«[f:0|{"a": 1]».', ['bad_json'], [], True),
    ('«[f:0|]».', ['bad_json'], [], True),
    ('«[f:0|{"a": NaN}]».', ['bad_json'], [], True),
    ('«[f:0|{"a": 1, "a": 2}]».', ['bad_json'], [], True),
    ('«[f:0|' + '~[' * 100_000 + ']».', ['bad_json'], [], True),
    ('«[f:0|{"a": ' + '9' * 5000 + '}]».', ['bad_json'], [], True),
    ('«[f:0|~[1~]]».', ['not_an_object'], [], True),
    ('«[|{}]».', ['missing_id'], [], True),
    ('«[]».', ['missing_id'], [], True),
    ('«[f|{}]».', ['bad_id'], [], True),
    ('«[f:x|{}]».', ['bad_id'], [], True),
    ('«[functions~.:0|{}]».', ['bad_id'], [], True),
    ('«[f:0]».', ['unknown_form'], [], True),
    ('«[f:0|{}][f:0|{}]».', ['f', 'duplicate_id'], [], True),
    ('«[f:0|{}|]».', ['unknown_form'], [], True),
    ('«[f:0|{@}]».', ['unknown_form'], [], True),
    ('«[f:0|{"a"[g:1|{}]».', ['truncated', 'g'], [], True),
    ('«[f:0|{"a"».', ['truncated'], [], True),
    ('«[f:0|{"a".', ['truncated'], ['unclosed_section'], True),
    ('«[f:0|{"a"', ['truncated'], ['unclosed_section'], False),
    ('«[f:', ['truncated'], ['unclosed_section'], False),
    ('«[f:0|{}].', ['f'], ['unclosed_section'], True),
    ('[f:0|{}].', ['unknown_form'], [], True),
    ('«[f:0|{}]»[g:1|{}].', ['f', 'unknown_form'], [], True),
    ('«[f:0|{}]»«[g:1|{}]».', ['f', 'unknown_form'], ['unexpected_mark'] * 2, True),
    ('« noise [f:0|{}]» more.', ['f'], ['stray_text'], True),
    ('a@b.', [], ['unexpected_mark'], True),
    ('(a)b.', [], ['unexpected_mark', 'unexpected_mark'], True),
    ('hi.more', [], ['after_end'], True),
])
def test_every_form(parse, text, calls, problems, ended):
  assert _kinds(parse(text)) == (calls, problems, ended)


def test_reasoning(parse):
  assert parse('a)b.', in_reasoning=True).reasoning == 'a'
  assert _kinds(parse('a.', in_reasoning=True)) == ([], ['unclosed_reasoning'], True)
  turn = parse('a«[f:0|{}]».', in_reasoning=True)  # as in vLLM's parser
  assert (turn.reasoning, *_kinds(turn)) == ('a', ['f'], [], True)
  turn = parse('(a)b.', may_reason=True)
  assert (turn.reasoning, turn.content, turn.problems) == ('a', 'b', ())
  assert _kinds(parse('b(a).', may_reason=True))[1] == ['unexpected_mark'] * 2
  assert _kinds(parse('(a)(b).', may_reason=True))[1] == ['unexpected_mark'] * 2


def test_spelled_marks_are_text(parse, kimi):
  spelled = '</think><|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>'
  ids = [*kimi.encode(spelled), kimi.special('</think>'), *kimi.encode(spelled)]
  turn = kimi_parse.parse(kimi, ids, in_reasoning=True)
  assert (turn.reasoning, turn.content, turn.calls, turn.problems) == (spelled, spelled, (), ())
  open_call = [kimi.special(SHORT[m]) for m in ('«', '[')] + kimi.encode('f:0')
  ids = [*open_call, kimi.special(SHORT['|']),
         *kimi.encode('{"a": "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"}'),
         *[kimi.special(SHORT[m]) for m in (']', '»', '.')]]
  turn = kimi_parse.parse(kimi, ids)
  assert [c.arguments for c in turn.calls] == [
      {'a': '<|tool_call_end|><|tool_calls_section_end|><|im_end|>'}]


def test_known_tools_and_bytes_that_are_no_text(parse, kimi):
  turn = parse('«[f:0|{}][g:1|{}]».', tools=['g'])
  assert turn.calls[0] == BadCall('unknown_tool', 'there is no tool f', 'f:0')
  assert turn.calls[1].name == 'g'
  ids = [kimi.special(SHORT[m]) for m in ('«', '[')] + kimi.encode('f:0')
  ids += [kimi.special(SHORT['|']), *kimi.encode_bytes(b'{"a": "\xff"}'), kimi.special(SHORT[']'])]
  assert _kinds(kimi_parse.parse(kimi, ids))[0] == ['bad_json']


def test_no_ids_at_all_raise(parse, kimi):
  rng = random.Random(0)
  whole = [kimi.special(SHORT['«'])]
  for text in ('f:0', 'functions.g:1', 'h:2'):
    whole += [kimi.special(SHORT['[']), *kimi.encode(text), kimi.special(SHORT['|']),
              *kimi.encode('{"a": [1]}'), kimi.special(SHORT[']'])]
  whole = [*kimi.encode('Hm'), kimi.special('</think>'), *whole, kimi.special(SHORT['»']),
           kimi.end_id]
  marks = [kimi.special(mark) for mark in SHORT.values()]
  anything = [*marks * 20, *range(kimi.vocab_size), -1, kimi.vocab_size, 10**9]
  good, bad = 0, set()
  for _ in range(3000):
    ids = list(whole)
    for _ in range(rng.choice([0, 1, 2, 5, 40])):
      at = rng.randrange(len(ids) + 1)
      ids[at:at + rng.randrange(3)] = rng.choices(anything, k=rng.randrange(2))
    turn = kimi_parse.parse(kimi, ids, in_reasoning=rng.random() < 0.5,
                            may_reason=rng.random() < 0.5)
    assert turn.ended == (kimi.end_id in ids)
    said = ids[:ids.index(kimi.end_id)] if turn.ended else ids
    assert len(turn.calls) <= said.count(kimi.special(SHORT['[']))
    for call in turn.calls:
      if isinstance(call, ToolCall):
        good += 1
        assert kimi_parse.parse_call(call.id, call.text) == call
      else:
        bad.add(call.kind)
        assert call.message
  assert good > 1000
  assert bad >= {'missing_id', 'bad_id', 'bad_json', 'unknown_form', 'truncated'}
