"""A conversation as tokens: append-only, with the role mask exact to the token.

    <|user|>instruction<|end|>
    <|call|>MODEL TOKENS<|end|><|result|>text<|end|>
    <|call|>MODEL TOKENS<|end|>

`<|call|>` is forced by the harness; the model owns everything after it, its `<|end|>` included.
Each piece is encoded on its own and pieces are only ever appended, so no later turn can change the
ids of an earlier one, and sampled ids are never encoded again.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from composer_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of ids with one owner.

  Attributes:
    ids: token ids.
    trainable: True where the model produced (or, in a demonstration, has to produce) the ids.
  """

  ids: tuple[int, ...]
  trainable: bool


class Renderer:
  """Encodes the pieces of a conversation; stateless, so that it can serve many episodes at once.

  Attributes:
    tokenizer: the tokenizer in use.
    end_id: id of `<|end|>`, which ends every piece; the model has to sample it to end a turn.
  """

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer = tokenizer
    self.end_id = tokenizer.end_id

  def user(self, text: str) -> list[int]:
    """Returns `<|user|>text<|end|>`."""
    return [self.tokenizer.user_id, *self.tokenizer.encode(text), self.end_id]

  def call_open(self) -> list[int]:
    """Returns `<|call|>`, after which the model speaks."""
    return [self.tokenizer.call_id]

  def call(self, text: str) -> list[int]:
    """Returns what a model that says `text` samples: `text<|end|>`; for demonstrations."""
    return [*self.tokenizer.encode(text), self.end_id]

  def result(self, text: str) -> list[int]:
    """Returns `<|result|>text<|end|>`."""
    return [self.tokenizer.result_id, *self.tokenizer.encode(text), self.end_id]

  def call_text(self, ids: Sequence[int]) -> str:
    """Returns the text of sampled ids, without the closing `<|end|>` if it is there.

    Other special ids show by their spelling, so that a parser can refuse them.
    """
    ids = ids[:-1] if len(ids) and ids[-1] == self.end_id else ids
    return self.tokenizer.decode(ids)


def render_segments(renderer: Renderer, instruction: str,
                    turns: Iterable[tuple[str, str | None]]) -> list[Segment]:
  """Renders a demonstration as the harness would build it live.

  Args:
    renderer: the renderer of the run.
    instruction: the user's text.
    turns: (call text, result text) pairs; a result of None ends the conversation there.

  Returns:
    Alternating segments; `<|call|>` belongs to the context, the call text and its `<|end|>` are
    trainable.
  """
  segments = []
  context = renderer.user(instruction)
  for call, result in turns:
    context = context + renderer.call_open()
    segments += [Segment(tuple(context), False), Segment(tuple(renderer.call(call)), True)]
    context = [] if result is None else renderer.result(result)
    if result is None:
      break
  if context:
    segments.append(Segment(tuple(context), False))
  return segments


def flatten(segments: Iterable[Segment]) -> tuple[list[int], list[bool]]:
  """Returns the ids of all segments in order, and for each id whether it is trainable."""
  ids: list[int] = []
  mask: list[bool] = []
  for segment in segments:
    ids.extend(segment.ids)
    mask.extend([segment.trainable] * len(segment.ids))
  return ids, mask
