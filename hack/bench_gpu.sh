#!/bin/sh
# dovetail doctor --gpu, then benchmarks/bench_gpu.py; see gpu_python.sh.
set -eu
cd "$(dirname "$0")/.."
hack/gpu_python.sh -m dovetail.cli.main doctor --gpu || echo "dovetail doctor found problems; measuring all the same" >&2
hack/gpu_python.sh benchmarks/bench_gpu.py "$@"
