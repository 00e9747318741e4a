#!/bin/sh
# benchmarks/bench_gpu.py with this checkout's .venv. Without one: with PYTHON (python3), which must have torch,
# transformers, triton, numpy and safetensors, and with the wheels of `make bench-gpu-wheels`. Nothing is downloaded.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x "$python" ]; then
    python=${PYTHON:-python3}
    [ -d .wheels ] || { echo "no .venv and no .wheels here: run make install, or bring .wheels (make bench-gpu-wheels)" >&2; exit 2; }
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
    export PYTHONPATH="$site:$PWD/src:$PWD/trainer_image:$PWD/rollout_image:$PWD/operator"
fi
"$python" -m dovetail.cli.main doctor --gpu || echo "dovetail doctor found problems; measuring all the same" >&2
"$python" benchmarks/bench_gpu.py "$@"
