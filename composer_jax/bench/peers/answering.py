"""What the peers share: one JSON object a line in, one out. Needs torch only, as they do."""

import json
import sys
import time

import torch


class Answerer:
  """Each request `{"do": NAME, ...}` calls the method of that name with the whole message."""

  def gemm(self, message):
    """Times one product of square matrices."""
    a = torch.ones(message['size'], message['size'])
    start = time.perf_counter()
    torch.mm(a, a)
    return {'seconds': time.perf_counter() - start}


def serve(peer, about):
  """Says what the peer is, then answers one line after another until the input ends."""
  print(json.dumps(about), flush=True)
  for line in sys.stdin:
    message = json.loads(line)
    try:
      answer = getattr(peer, message['do'])(message)
    except Exception as error:  # noqa: BLE001 - the other side prints it and stops
      answer = {'error': f'{type(error).__name__}: {error}'}
    print(json.dumps(answer), flush=True)
