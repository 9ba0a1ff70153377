"""Speaks the protocol of the peers without torch.

Answers come from a JSON file beside this script: {request: [answer, ...]}, used up in turn, the
last one staying. An answer may also be "die", "hang" or "talk".
"""

import json
import pathlib
import sys
import time

script = json.loads((pathlib.Path(__file__).parent / 'answers.json').read_text())
print(json.dumps({'torch': 'stub', 'transformers': 'stub'}), flush=True)
for line in sys.stdin:
  answers = script[json.loads(line)['do']]
  answer = answers.pop(0) if len(answers) > 1 else answers[0]
  if answer == 'die':
    sys.exit('some traceback\nMemoryError: the last line')
  if answer == 'hang':
    time.sleep(1000)
  print('not JSON' if answer == 'talk' else json.dumps(answer), flush=True)
