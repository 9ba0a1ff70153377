import pytest

from composer_jax.rollout.session import Status


class ScriptedSession:
  """Plays fixed texts: one list of ids per turn; waits `wait` polls before each but the first."""

  def __init__(self, id, texts, budget=8, wait=0, group_id='g'):
    self.id, self.group_id = id, group_id
    self.texts, self.budget, self.wait = list(texts), budget, wait
    self.turns, self.ended, self.aborted = [], [], None
    self._waited = 0

  def poll(self):
    if self.aborted or len(self.turns) == len(self.texts):
      return Status.DONE
    if self.turns and self._waited < self.wait:
      self._waited += 1
      return Status.WAITING
    return Status.READY

  def next_tokens(self):
    self._waited = 0
    return self.texts[len(self.turns)]

  def max_new_tokens(self):
    return self.budget

  def deliver(self, tokens, ended):
    self.turns.append(list(tokens))
    self.ended.append(ended)

  def abort(self, reason):
    self.aborted = reason


@pytest.fixture
def scripted_session():
  return ScriptedSession
