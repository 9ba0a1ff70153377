"""Samples: what counts as whole and trainable, and the round trip through a checkpoint."""

import dataclasses

import numpy as np
import pytest

from composer_jax.rl import samples as lib


def test_groups_survive_serialisation(fakes):
  groups = [
      lib.Group(7, (fakes.sample(1.0, 'g7', 'a', seed=1), fakes.sample(0.0, 'g7', 'b', seed=2)),
                False),
      lib.Group(9, (fakes.sample(1.0, 'g9', 'c', seed=3),), True)]
  back = lib.groups_from_bytes(lib.groups_to_bytes(groups))
  assert [(g.ordinal, g.zero_signal) for g in back] == [(7, False), (9, True)]
  for old, new in zip([s for g in groups for s in g.samples],
                      [s for g in back for s in g.samples], strict=True):
    assert new.outcome == old.outcome
    assert (new.group_id, new.logical_id, new.segment) == (old.group_id, old.logical_id,
                                                           old.segment)
    for field in dataclasses.fields(old.rollout):
      a, b = getattr(old.rollout, field.name), getattr(new.rollout, field.name)
      assert np.array_equal(a, b) and getattr(a, 'dtype', None) == getattr(b, 'dtype', None)
  assert lib.groups_from_bytes(lib.groups_to_bytes([])) == []


def test_no_verdict_or_no_token_is_not_trainable(fakes):
  assert fakes.sample(0.0).trainable
  assert not fakes.sample(None, stop='infrastructure').trainable
  assert not fakes.sample(None, stop='aborted').trainable
  assert not fakes.sample(0.0, sampled='....').trainable


def test_malformed_rows_are_refused(fakes):
  good = fakes.sample()

  def changed(**fields):
    return dataclasses.replace(good, rollout=dataclasses.replace(good.rollout, **fields))

  lib.validate([good])
  r = good.rollout
  with pytest.raises(ValueError, match='9 of 10 tokens'):
    lib.validate([changed(versions=r.versions[:-1])])
  back = r.versions.copy()
  back[-1] = -1
  with pytest.raises(ValueError, match='backwards'):
    lib.validate([changed(versions=back)])
  with pytest.raises(ValueError, match='log-prob'):
    lib.validate([changed(logprobs=np.where(r.sampled, np.nan, 0).astype(np.float32))])


def test_a_rollout_with_a_missing_part_is_refused(fakes):
  parts = [fakes.sample(logical='l', segment=i) for i in (0, 1, 2)]
  lib.validate(parts)
  with pytest.raises(ValueError, match='missing or twice'):
    lib.validate([parts[0], parts[2]])
  with pytest.raises(ValueError, match='missing or twice'):
    lib.validate([parts[0], parts[1], parts[1]])
