#!/bin/sh
# Python with this checkout's .venv. Without one: PYTHON (python3), which must have torch, transformers, triton, numpy and
# safetensors, with the wheels of `make bench-gpu-wheels`. Nothing is downloaded. See docs/gpus.md.
set -eu
cd "$(dirname "$0")/.."
[ ! -x .venv/bin/python ] || exec .venv/bin/python "$@"
python=${PYTHON:-python3}
[ -d .wheels ] || { echo "no .venv and no .wheels here: run make install, or bring .wheels (make bench-gpu-wheels)" >&2; exit 2; }
[ -d .wheels/site ] || "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target .wheels/site .wheels/*.whl
PYTHONPATH="$PWD/.wheels/site:$PWD/src:$PWD/trainer_image:$PWD/rollout_image:$PWD/operator" exec "$python" "$@"
