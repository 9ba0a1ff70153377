#!/usr/bin/env bash
# Checks and times every kernel on the accelerator of this machine, in at most five minutes:
#
#   kernels/device_check.sh [TABLE.json]
#
# PYTHON names the interpreter (default: that of .venv, else python3). It needs jax for the device
# and jaxtyping; the project need not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
table=${1:-device_check.json}

# composer_jax.kernels lies elsewhere in the tree, see setup.py.
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
mkdir "$package/composer_jax"
ln -s "$PWD"/composer_jax/* "$PWD/kernels" "$package/composer_jax/"

PYTHONPATH="$package" timeout 300 "$python" - "$table" <<'PYTHON'
import datetime
import json
import sys

from composer_jax.bench import ops

facts = ops.run([], 10, show=lambda line: print(line, flush=True))
facts['date'] = datetime.date.today().isoformat()
with open(sys.argv[1], 'w') as file:
  json.dump(facts, file, indent=1)
PYTHON
echo "$table"
