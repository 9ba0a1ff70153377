"""Batches: positions, isolation of documents, exact resume, realised mixture, exact byte counts."""

import json
import math

import numpy as np
import pytest

from composer_jax.data import chat, loader
from composer_jax.errors import UserError

MIX = {'code': 1.0, 'functions': 3.0}
S = 48


def _same(a, b):
  for name in ('tokens', 'targets', 'weights', 'positions', 'segment_ids', 'denominator'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def _segments(batch):
  """Yields (tokens, targets, weights, positions) of every segment of every row."""
  for r in range(batch.tokens.shape[0]):
    for number in range(1, batch.segment_ids[r].max() + 1):
      at = batch.segment_ids[r] == number
      where = np.flatnonzero(at)
      assert len(where) == where[-1] - where[0] + 1  # in one piece
      yield tuple(x[r][at] for x in (batch.tokens, batch.targets, batch.weights, batch.positions))


def test_shapes_types_and_padding(corpus):
  batch = next(loader.cpt_loader(MIX, corpus.path, 4, S, 0))
  assert all(x.shape == (4, S) for x in (
      batch.tokens, batch.targets, batch.weights, batch.positions, batch.segment_ids))
  assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == np.int32
  pad = batch.segment_ids == 0
  assert not batch.tokens[pad].any() and not batch.weights[pad].any()
  assert batch.denominator == batch.weights.sum() > 0


def test_positions_restart_and_targets_stay_inside_their_document(corpus):
  doc = corpus.tokenizer.doc_id
  starts = 0
  it = loader.cpt_loader(MIX, corpus.path, 4, S, 0)
  for _ in range(20):
    for tokens, targets, weights, positions in _segments(next(it)):
      np.testing.assert_array_equal(positions, np.arange(len(tokens)))
      np.testing.assert_array_equal(targets[:-1], tokens[1:])
      assert doc not in tokens[1:] and doc not in targets
      assert (weights[:-1] == 1).all() and weights[-1] == (targets[-1] != 0)
      starts += tokens[0] == doc
  assert starts > 40


def test_one_epoch_holds_every_token_as_a_target_once(corpus):
  documents = corpus.documents('code', 'train')
  it = loader.cpt_loader({'code': 1}, corpus.path, 1, S, 3)
  counts = np.zeros(corpus.manifest['vocab_size'], int)
  for _ in range(len(it.rows['code'])):
    batch = next(it)
    counts += np.bincount(batch.targets[batch.weights > 0], minlength=len(counts))
  np.testing.assert_array_equal(counts, np.bincount(documents.tokens, minlength=len(counts)))


@pytest.mark.parametrize('step', [0, 1, 7, 40])
def test_resume_continues_with_the_very_next_batch(corpus, step):
  # 40 batches of 4 rows of the small source are several epochs.
  it = loader.cpt_loader({'functions': 1, 'code': 2}, corpus.path, 4, 256, 5)
  for _ in range(step):
    next(it)
  state = json.loads(json.dumps(it.get_state()))
  following = [next(it) for _ in range(6)]
  again = loader.cpt_loader({'functions': 1, 'code': 2}, corpus.path, 4, 256, 5)
  next(again)
  again.set_state(state)
  for batch in following:
    _same(batch, next(again))


def test_order_follows_the_seed_and_changes_with_the_epoch(corpus):
  def rows(seed, count):
    it = loader.cpt_loader({'functions': 1}, corpus.path, 1, 256, seed)
    return len(it.rows['functions']), [next(it).tokens.tobytes() for _ in range(count)]

  n, first = rows(0, 80)
  assert first == rows(0, 80)[1]
  assert set(first) != set(rows(1, 80)[1])
  assert 10 < n < 40 and set(first[:n]) == set(first[n:2 * n]) and first[:n] != first[n:2 * n]


def test_mixture_shares_are_realised_row_by_row(corpus):
  it = loader.cpt_loader(MIX, corpus.path, 8, S, 0)
  add = corpus.tokenizer.encode('# add')[:2]
  total = ours = 0
  code_rows = {it.rows['code'][r].tokens.tobytes() for r in range(len(it.rows['code']))}
  for _ in range(50):
    batch = next(it)
    total += 8
    ours += sum(row.tobytes() in code_rows for row in batch.tokens)
  assert len(add) and ours == total / 4


def test_a_source_of_weight_zero_is_left_out(corpus):
  it = loader.cpt_loader({'code': 2.0, 'functions': 0}, corpus.path, 4, S, 0)
  alone = loader.cpt_loader({'code': 1.0}, corpus.path, 4, S, 0)
  assert it.rows.keys() == {'code'}
  for _ in range(5):
    _same(next(it), next(alone))


def test_a_mixture_that_does_not_fit_is_refused(corpus):
  for mix, message in (({'cod': 1}, r'mixture.cod: .*did you mean code'),
                       ({'code': -1.0}, 'is negative'), ({'code': 0.0}, 'no source has a positive'),
                       ({}, 'no source has a positive')):
    with pytest.raises(UserError, match=message):
      loader.cpt_loader(mix, corpus.path, 4, S, 0)


@pytest.mark.parametrize('seq_len', [7, 48, 4096])
@pytest.mark.parametrize('max_bytes', [None, 4000])
def test_heldout_batches_count_every_byte_once(corpus, seq_len, max_bytes):
  files = corpus.heldout_files('code', max_bytes)
  batches, size = loader.heldout_batches(corpus.path, 'code', seq_len, 4, max_bytes)
  assert size == sum(map(len, files))
  got = b''
  by_first = {}
  for batch in batches:
    assert batch.tokens.shape == (4, seq_len)
    for tokens, targets, weights, _ in _segments(batch):
      scored = targets[weights > 0].tolist()
      assert set(np.unique(weights)) <= {0.0, 1.0}
      got += corpus.tokenizer.decode_bytes(scored)
      by_first[int(tokens[0])] = by_first.get(int(tokens[0]), 0) + 1
  assert sorted(got) == sorted(b''.join(files))
  assert by_first[corpus.tokenizer.doc_id] == len(files)
  if seq_len == 4096:
    # One stretch a file: the files come back whole.
    whole = [corpus.tokenizer.decode_bytes(t[w > 0].tolist())
             for b in batches for _, t, w, _ in _segments(b)]
    assert sorted(whole) == sorted(files)


def test_bits_per_byte_of_a_uniform_model(corpus):
  # A model that gives every id the same chance needs log2(V) bits a token.
  batches, size = loader.heldout_batches(corpus.path, 'functions', S, 4)
  vocab = corpus.manifest['vocab_size']
  nats = sum(float(b.weights.sum()) for b in batches) * math.log(vocab)
  tokens = corpus.manifest['sources']['functions']['heldout']['tokens']
  assert nats / math.log(2) / size == pytest.approx(tokens * math.log2(vocab) / size, rel=1e-12)


def test_no_heldout_file_is_in_the_training_rows(corpus):
  it = loader.cpt_loader({'code': 1}, corpus.path, 1, 4096, 0)
  text = b''
  for _ in range(len(it.rows['code'])):
    text += corpus.tokenizer.decode_bytes(next(it).tokens[0].tolist())
  assert not any(file in text for file in corpus.heldout_files('code'))


def _write_traces(path, renderer, count=30):
  lines = []
  for n in range(count):
    turns = [(f'read_file {n}', 'code\n' * (n % 4)), ('finish', None)]
    segments = chat.render_segments(renderer, f'fix f{n}', turns)
    lines.append({'id': f't{n}', 'segments': [list(s.ids) for s in segments],
                  'trainable': [s.trainable for s in segments], 'reward': 1.0})
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  return {tuple(i for s in line['segments'] for i in s):
          [flag for s, flag in zip(line['segments'], line['trainable'], strict=True) for _ in s]
          for line in lines}


def test_traces_are_read_as_recorded_with_exact_weights(corpus, tmp_path):
  recorded = _write_traces(tmp_path / 'traces.jsonl', chat.Renderer(corpus.tokenizer))
  it = loader.trace_loader(tmp_path / 'traces.jsonl', 1, 128, 0, context_weight=0.1)
  seen = set()
  for _ in range(len(it.rows['traces'])):
    for tokens, targets, weights, positions in _segments(next(it)):
      key = tuple(tokens.tolist())
      mask = recorded[key]  # the ids of a live run, whole
      seen.add(key)
      np.testing.assert_array_equal(positions, np.arange(len(tokens)))
      assert targets.tolist() == [*key[1:], 0]
      want = [1.0 if on else 0.1 for on in mask[1:]] + [0.0]
      np.testing.assert_array_equal(weights, np.array(want, np.float32))
  assert seen == set(recorded)


def test_first_and_last_model_token_of_a_hand_written_trace(tmp_path):
  # user 10 end | call || 11 12 end || result 13 end call || 14 end
  line = {'id': 'a', 'segments': [[2, 10, 5, 3], [11, 12, 5], [4, 13, 5, 3], [14, 5]],
          'trainable': [False, True, False, True]}
  (tmp_path / 't.jsonl').write_text(json.dumps(line) + '\n')
  batch = next(loader.trace_loader(tmp_path / 't.jsonl', 1, 16, 0))
  assert batch.tokens[0].tolist() == [2, 10, 5, 3, 11, 12, 5, 4, 13, 5, 3, 14, 5, 0, 0, 0]
  assert batch.targets[0].tolist() == [10, 5, 3, 11, 12, 5, 4, 13, 5, 3, 14, 5, 0, 0, 0, 0]
  assert batch.weights[0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
  assert batch.denominator == 5


def test_own_tokens_that_must_not_be_learnt_weigh_nothing(tmp_path):
  line = {'id': 'a', 'segments': [[2, 10, 3], [11, 5], [4, 13, 3], [14, 5]],
          'trainable': [False, None, False, True]}
  (tmp_path / 't.jsonl').write_text(json.dumps(line) + '\n')
  batch = next(loader.trace_loader(tmp_path / 't.jsonl', 1, 10, 0, context_weight=0.5))
  assert batch.weights[0].tolist() == [0.5, 0.5, 0, 0, 0.5, 0.5, 0.5, 1, 1, 0]
  line['trainable'][1] = 1
  (tmp_path / 't.jsonl').write_text(json.dumps(line) + '\n')
  with pytest.raises(UserError, match='true, false and null'):
    loader.trace_loader(tmp_path / 't.jsonl', 1, 10, 0)


@pytest.mark.parametrize('seq_len', [64, 128])
def test_trace_batches_hold_every_trace_once_with_its_own_mask(corpus, tmp_path, seq_len):
  recorded = _write_traces(tmp_path / 'traces.jsonl', chat.Renderer(corpus.tokenizer))
  batches = loader.trace_batches(tmp_path / 'traces.jsonl', 4, seq_len)
  assert all(batch.tokens.shape == (4, seq_len) for batch in batches)
  seen = []
  for batch in batches:
    for tokens, targets, weights, positions in _segments(batch):
      key = tuple(tokens.tolist())
      seen.append(key)
      np.testing.assert_array_equal(positions, np.arange(len(tokens)))
      assert targets.tolist() == [*key[1:], 0]
      assert weights.tolist() == [*recorded[key][1:], 0]
  assert sorted(seen) == sorted(recorded)
  for a, b in zip(batches, loader.trace_batches(tmp_path / 'traces.jsonl', 4, seq_len),
                  strict=True):
    _same(a, b)


def test_trace_loader_resumes_exactly(corpus, tmp_path):
  path = tmp_path / 'traces.jsonl'
  _write_traces(path, chat.Renderer(corpus.tokenizer))
  it = loader.trace_loader([path], 2, 96, 1)
  for _ in range(9):
    next(it)
  state = it.get_state()
  again = loader.trace_loader([path], 2, 96, 1)
  again.set_state(state)
  for _ in range(5):
    _same(next(it), next(again))


def test_bad_traces_are_one_line(corpus, tmp_path):
  path = tmp_path / 'traces.jsonl'
  _write_traces(path, chat.Renderer(corpus.tokenizer))
  with pytest.raises(UserError, match='trace t.* tokens, seq_len is 24'):
    loader.trace_loader(path, 2, 24, 0)
  with pytest.raises(UserError, match='trace t.* tokens, seq_len is 24'):
    loader.trace_batches(path, 2, 24)
  empty = tmp_path / 'empty.jsonl'
  empty.write_text('')
  with pytest.raises(UserError, match='empty.jsonl: no traces'):
    loader.trace_loader(empty, 2, 64, 0)
  with pytest.raises(UserError, match='cannot read the traces'):
    loader.trace_loader(tmp_path / 'none.jsonl', 2, 64, 0)
  for line in ('{', '{"id": 1}', '{"segments": [[1, 2]], "trainable": []}',
               '{"segments": [], "trainable": []}', '[]', '{"segments": 3, "trainable": [true]}'):
    path.write_text(line + '\n')
    with pytest.raises(UserError, match=r'traces.jsonl:1: is not a trace'):
      loader.trace_loader(path, 2, 64, 0)
