import pytest

from composer_jax.rollout.session import Status


class ScriptedSession:
  """Plays fixed texts, one a turn; waits `wait` polls before each but the first."""

  def __init__(self, id, texts, wait=0):
    self.id, self.group_id, self.texts, self.wait = id, 'g', texts, wait
    self.turns, self.over, self._waited = 0, False, 0

  def poll(self):
    if self.over or self.turns == len(self.texts):
      return Status.DONE
    if self.turns and self._waited < self.wait:
      self._waited += 1
      return Status.WAITING
    return Status.READY

  def next_tokens(self):
    self._waited = 0
    return self.texts[self.turns]

  def max_new_tokens(self):
    return 8

  def deliver(self, tokens, ended):
    self.turns += 1

  def abort(self, reason):
    self.over = True


@pytest.fixture
def scripted_session():
  return ScriptedSession
