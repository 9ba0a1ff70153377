"""Kimi conversations: the documented text, append-only ids, one owner for each token (G1-G3)."""

import json
import random
import re

import pytest

from composer_jax.data import chat_template, kimi_chat
from composer_jax.errors import UserError

STYLES = ['k2', 'k2_thinking', 'k2_5', 'k2_5_instant']
# Pieces that would merge across a boundary, and spellings of marks.
WORDS = ['fix', ' the', ' function', '\n', ' ', '{"', '"}', 'é', '漢字', "'s", '12', '<|im_end|>',
         '</think>', '<|tool_calls_section_begin|>', '']
TOOLS = [{'type': 'function', 'function': {'name': 'read', 'parameters': {}}}]


def _text(rng):
  return ''.join(rng.choices(WORDS, k=rng.randrange(7)))


def _grow(rng, conversation, turns):
  """Yields after each message appended to a random conversation; returns its demonstrated turns."""
  thinks = conversation.renderer.style in ('k2_thinking', 'k2_5')
  conversation.system(_text(rng))
  yield
  for _ in range(turns):
    conversation.user(_text(rng))
    yield
    for _ in range(rng.randrange(1, 4)):
      wanted = [(f'f{n}', {'a': _text(rng), 'n': n}) for n in range(rng.randrange(4))]
      said = (_text(rng), _text(rng) if thinks else '', wanted)
      calls = conversation.say(*said)
      yield said, calls
      for call in calls:
        conversation.result(call.id, _text(rng))
        yield


def test_a_k2_5_conversation_is_the_documented_text(kimi):
  conversation = kimi_chat.Conversation(kimi_chat.KimiRenderer(kimi))
  conversation.declare(TOOLS)
  conversation.system('S')
  conversation.user('U')
  first = conversation.say('I look.', 'Hm.', [('read', {'path': 'ä'}), ('read', {'path': 'b'})])
  conversation.result(first[0].id, 'one\n')
  conversation.result(first[1].id, 'two')
  second = conversation.say('', '', [('list', {})])
  conversation.result(second[0].id, 'three')
  conversation.call_open()
  assert kimi.decode(conversation.ids) == (
      '<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n'
      'type read = (_: {}) => any;\n}\n<|im_end|>'
      '<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>'
      '<|im_assistant|>assistant<|im_middle|><think>Hm.</think>I look.'
      '<|tool_calls_section_begin|>'
      '<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"path": "ä"}'
      '<|tool_call_end|>'
      '<|tool_call_begin|>functions.read:1<|tool_call_argument_begin|>{"path": "b"}'
      '<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
      '<|im_system|>tool<|im_middle|>## Return of functions.read:0\none\n<|im_end|>'
      '<|im_system|>tool<|im_middle|>## Return of functions.read:1\ntwo<|im_end|>'
      '<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>'
      '<|tool_call_begin|>functions.list:2<|tool_call_argument_begin|>{}<|tool_call_end|>'
      '<|tool_calls_section_end|><|im_end|>'
      '<|im_system|>tool<|im_middle|>## Return of functions.list:2\nthree<|im_end|>'
      '<|im_assistant|>assistant<|im_middle|><think>')


@pytest.mark.parametrize(('style', 'prompt', 'own'), [
    ('k2', '', 'Yes.<|im_end|>'), ('k2_thinking', '', '<think>R</think>Yes.<|im_end|>'),
    ('k2_5', '<think>', 'R</think>Yes.<|im_end|>'),
    ('k2_5_instant', '<think></think>', 'Yes.<|im_end|>')])
def test_what_the_prompt_opens_is_not_the_models(kimi, style, prompt, own):
  renderer = kimi_chat.KimiRenderer(kimi, style)
  conversation = kimi_chat.Conversation(renderer)
  conversation.user('U')
  conversation.say('Yes.', 'R' if 'R' in own else '')
  context, body = (kimi.decode(s.ids) for s in
                   (conversation.segments[1], conversation.segments[2]))
  assert context == '<|im_assistant|>assistant<|im_middle|>' + prompt
  assert body == own
  if 'R' not in own:
    with pytest.raises(UserError, match='has no reasoning'):
      renderer.call('', 'R')


@pytest.mark.parametrize('style', STYLES)
def test_append_only_and_owned_exactly(kimi, style, cut_spans):
  rng = random.Random(0)
  for _ in range(50):
    conversation = kimi_chat.Conversation(kimi_chat.KimiRenderer(kimi, style))
    before, turns = [], []
    for event in _grow(rng, conversation, rng.randrange(1, 4)):
      ids = conversation.ids
      assert ids[:len(before)] == before
      before = ids
      turns += [event] if event else []
    bodies = [conversation.renderer.call(content, reasoning, [(c.id, c.text) for c in calls])
              for (content, reasoning, _), calls in turns]
    assert cut_spans(conversation.ids, conversation.trainable) == bodies
    assert len(conversation.ids) == len(conversation.trainable)
    made = [c.id for _, calls in turns for c in calls]
    assert [int(i.rpartition(':')[2]) for i in made] == list(range(len(made)))


@pytest.mark.parametrize('style', STYLES)
def test_what_is_said_is_what_is_parsed(kimi, style):
  rng = random.Random(1)
  renderer = kimi_chat.KimiRenderer(kimi, style)
  for _ in range(100):
    conversation = kimi_chat.Conversation(renderer)
    for event in _grow(rng, conversation, 1):
      if event:
        (content, reasoning, wanted), calls = event
        body = conversation.segments[-1].ids
        turn = renderer.parse(body)
        assert (turn.content, turn.reasoning, turn.problems, turn.ended) == (
            content, reasoning, (), True)
        assert turn.calls == tuple(calls)
        assert [(c.name, c.arguments) for c in calls] == wanted
        # Spellings of marks cost ordinary tokens: the marks that are there are the structure.
        marks = sum(token >= 320 for token in body)
        assert marks == 1 + (3 * len(calls) + 2 if calls else 0) + {
            'k2_thinking': 2, 'k2_5': 1}.get(style, 0)


def test_sampled_ids_stay_as_they_are(kimi, cut_spans):
  renderer = kimi_chat.KimiRenderer(kimi)
  conversation = kimi_chat.Conversation(renderer)
  conversation.user('U')
  conversation.call_open()
  # Single bytes where the tokenizer would merge, and a mark at a wrong place.
  odd = [kimi.encode_bytes(bytes([b]))[0] for b in b'fix the function']
  assert odd != kimi.encode('fix the function')
  odd += [kimi.special('<|im_user|>'), kimi.special('</think>'), renderer.end_id]
  turn = conversation.sampled(odd)
  conversation.user('more')
  assert cut_spans(conversation.ids, conversation.trainable) == [odd]
  assert [p.kind for p in turn.problems] == ['unexpected_mark']


def test_a_turn_that_was_cut_off_is_ended_by_the_context(kimi):
  renderer = kimi_chat.KimiRenderer(kimi)
  conversation = kimi_chat.Conversation(renderer)
  conversation.user('U')
  conversation.call_open()
  assert not conversation.sampled(kimi.encode('thinking')).ended
  conversation.user('go on')
  assert kimi.decode(conversation.segments[-1].ids) == (
      '<|im_end|><|im_user|>user<|im_middle|>go on<|im_end|>')
  assert conversation.trainable.count(True) == len(kimi.encode('thinking'))


def test_messages_out_of_turn_are_refused(kimi):
  conversation = kimi_chat.Conversation(kimi_chat.KimiRenderer(kimi))
  with pytest.raises(ValueError, match='not the turn of the model'):
    conversation.sampled([])
  conversation.call_open()
  with pytest.raises(ValueError, match='it is the turn of the model'):
    conversation.user('U')
  with pytest.raises(ValueError, match='before the first message'):
    conversation.declare(TOOLS)


def test_messages_of_the_openai_form(kimi):
  renderer = kimi_chat.KimiRenderer(kimi, 'k2')
  call = {'id': 'functions.f:0', 'function': {'name': 'f', 'arguments': '{"a":1}'}}
  conversation = kimi_chat.render_messages(renderer, [
      {'role': 'user', 'content': 'U', 'name': 'ann'},
      {'role': 'assistant', 'content': None, 'tool_calls': [call]},
      {'role': 'tool', 'tool_call_id': 'functions.f:0', 'content': 'r', 'name': 'f'}], TOOLS)
  assert kimi.decode(conversation.ids) == (
      '<|im_system|>tool_declare<|im_middle|>' + json.dumps(TOOLS, separators=(',', ':'))
      + '<|im_end|><|im_user|>ann<|im_middle|>U<|im_end|><|im_assistant|>assistant<|im_middle|>'
      '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>'
      '{"a":1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
      '<|im_system|>f<|im_middle|>## Return of functions.f:0\nr<|im_end|>'
      '<|im_assistant|>assistant<|im_middle|>')
  for bad in ({'role': 'critic', 'content': ''}, {'role': 'user', 'content': [{}]},
              {'role': 'assistant', 'content': '', 'tool_calls': [{'function': {}}]}):
    with pytest.raises(UserError, match=r'messages\[0\]'):
      kimi_chat.render_messages(renderer, [bad])


def test_a_name_takes_the_place_of_every_role(kimi):
  """As `message.get('name') or message['role']` does in the templates of K2, K2 Thinking, K2.5."""
  call = {'id': 'functions.f:0', 'function': {'name': 'f', 'arguments': '{}'}}
  messages = [{'role': 'system', 'content': 'S', 'name': 'rules'},
              {'role': 'user', 'content': 'U', 'name': 'ann'},
              {'role': 'assistant', 'content': 'A', 'name': 'bob', 'tool_calls': [call]},
              {'role': 'tool', 'content': 'T', 'name': 'f', 'tool_call_id': 'functions.f:0'},
              {'role': 'assistant', 'content': 'B', 'name': ''}]
  conversation = kimi_chat.render_messages(kimi_chat.KimiRenderer(kimi), messages)
  text = kimi.decode(conversation.ids)
  assert re.findall(r'<[|]im_(\w+)[|]>(\w+)<[|]im_middle', text) == [
      ('system', 'rules'), ('user', 'ann'), ('assistant', 'bob'), ('system', 'f'),
      ('assistant', 'assistant'), ('assistant', 'assistant')]
  theirs = chat_template.render(TEMPLATE, messages)
  assert chat_template.encode_marked(kimi, theirs) == conversation.ids


@pytest.mark.parametrize(('calls', 'answer', 'message'), [
    ([''], 'a', r'messages\[1\].tool_calls: id: has to be a text .* got \'\''),
    ([None], 'a', r'messages\[1\].tool_calls: id: has to be a text .* got None'),
    ([7], 'a', r'messages\[1\].tool_calls: id: has to be a text .* got 7'),
    (['a', 'a'], 'a', r"messages\[1\].tool_calls: id 'a' belongs to an earlier call"),
    (['a', 'again'], 'a', r"messages\[3\].tool_calls: id 'again' belongs to an earlier call"),
    (['a'], ' ', r"messages\[2\].tool_call_id: has to be a text .* got ' '")])
def test_calls_without_an_id_of_their_own_are_refused(kimi, calls, answer, message):
  def asking(ids):
    return {'role': 'assistant', 'content': '', 'tool_calls': [
        {'id': i, 'function': {'name': 'f', 'arguments': '{}'}} for i in ids]}

  messages = [{'role': 'user', 'content': 'U'}, asking(calls),
              {'role': 'tool', 'content': 'T', 'tool_call_id': answer}, asking(['again'])]
  with pytest.raises(UserError, match=message):
    kimi_chat.render_messages(kimi_chat.KimiRenderer(kimi), messages)


def test_a_tokenizer_without_the_marks_is_refused(bare_bpe):
  with pytest.raises(UserError, match='has no special token'):
    kimi_chat.KimiRenderer(bare_bpe)


# The checkpoint's own template. This one is ours, in the documented form of K2.5.
TEMPLATE = '''
{%- macro opening(mark, name) -%}<|im_{{ mark }}|>{{ name }}<|im_middle|>{%- endmacro -%}
{%- if tools -%}{{ opening('system', 'tool_declare') }}{{ tools_ts_str }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {%- set mark = m.role if m.role in ('user', 'assistant') else 'system' -%}
  {{- opening(mark, m.name or m.role) -}}
  {%- if m.role == 'tool' -%}{{ '## Return of ' + m.tool_call_id + '\\n' }}{%- endif -%}
  {%- if m.role == 'assistant' -%}
    {{- '<think>' + m.get('reasoning_content', '') + '</think>' -}}
  {%- endif -%}
  {{- m.content -}}
  {%- if m.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for c in m.tool_calls -%}
      <|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>
      {%- set args = c.function.arguments -%}
      {{- args if args is string else args | tojson }}
      {{- '<|tool_call_end|>' -}}
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}{{ opening('assistant', 'assistant') }}<think>{%- endif -%}
'''


def test_a_checkpoints_own_template_is_compared(kimi, kimi_folder, tmp_path):
  assert chat_template.style_of(TEMPLATE) == 'k2_5'
  assert chat_template.differences(kimi, TEMPLATE) == []
  other = TEMPLATE.replace('## Return of ', '## Result of ')
  (tmp_path / 'tiktoken.model').write_bytes((kimi_folder / 'tiktoken.model').read_bytes())
  with pytest.raises(UserError, match='holds no chat template'):
    chat_template.check_chat_template(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(other)
  lines = chat_template.check_chat_template(tmp_path)
  assert [line.split(': ')[1] for line in lines] == ['parallel calls', 'calls in a row']
  assert re.search("template gives '.*## Result of .*', the renderer '.*## Return of", lines[0])
  (tmp_path / 'chat_template.jinja').write_text('{% for x in %}')
  with pytest.raises(UserError, match='cannot be run'):
    chat_template.check_chat_template(tmp_path)


def test_styles_are_told_by_their_prompt():
  prompt = '{{ messages[0].role }}<|im_middle|>'
  styles = [chat_template.style_of(t) for t in (
      prompt, '{# <think> #}' + prompt, prompt + '<think>', prompt + '<think></think>')]
  assert styles == ['k2', 'k2_thinking', 'k2_5', 'k2_5_instant']


def test_random_conversations_equal_the_template(kimi):
  rng = random.Random(2)
  renderer = kimi_chat.KimiRenderer(kimi)
  safe = [word for word in WORDS if '<' not in word]
  def text():
    return ''.join(rng.choices(safe, k=rng.randrange(7)))

  for _ in range(60):
    messages, made = [{'role': 'system', 'content': text()}], 0
    for _ in range(rng.randrange(1, 5)):
      calls = [{'id': f'functions.f:{made + n}', 'function': {
          'name': 'f', 'arguments': rng.choice(['{"a": 1}', {'a': text()}])}}
               for n in range(rng.randrange(3))]
      made += len(calls)
      messages += [{'role': 'user', 'content': text()},
                   {'role': 'assistant', 'content': text(), 'reasoning_content': text(),
                    'tool_calls': calls}]
      messages += [{'role': 'tool', 'tool_call_id': c['id'], 'content': text()} for c in calls]
    theirs = chat_template.render(TEMPLATE, messages, TOOLS)
    ours = kimi_chat.render_messages(renderer, messages, TOOLS).ids
    assert chat_template.encode_marked(kimi, theirs) == ours
