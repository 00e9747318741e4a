"""Peak memory of real model shapes, as torch's CUDA allocator sees it on the null GPU, beside what the planner says.

    python benchmarks/bench_memory_gpu.py [--only WORD ...] [--json FILE]

Trainer ranks run two PPO iterations on samples of full length, with the trainer's own steps; scorers score them. The
null GPU (hack/nullgpu) computes nothing, but the allocator, FSDP2 and autograd are the real ones, so they ask for the
memory that they ask for on a GPU. Each process has its own device, larger than any that exists, so that all cases fit.

Prints for each case the rank that reserves most: GiB that torch's allocator had allocated and reserved at the peak, and
what the planner expects. The context and NCCL's buffers are no part of either, as the null GPU has neither. Ends with 1
if a prediction is more than 5% off. Needs Linux and gcc."""

from __future__ import annotations

import argparse
import json
import sys

from gpu_memory.cases import CASES
from gpu_memory.measured import Measuring
from gpu_memory.predicted import predicted

GIB = 2**30
TOLERANCE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these words")
    options = parser.parse_args()
    found, missed = [], False
    print(f"{'case':58} allocated  reserved   planner    error")
    with Measuring() as measuring:
        for case in CASES:
            if options.only and not any(word in case.name for word in options.only):
                continue
            device = measuring.run(case)
            expected = predicted(case)
            error = expected / device.reserved - 1
            found.append(
                {
                    "case": case.name,
                    "allocated_gib": device.allocated / GIB,
                    "reserved_gib": device.reserved / GIB,
                    "predicted_gib": expected / GIB,
                    "error": round(error, 4),
                    "seconds": round(device.seconds, 1),
                }
            )
            missed = missed or abs(error) > TOLERANCE
            sizes = "  ".join(f"{size / GIB:8.2f}" for size in (device.allocated, device.reserved, expected))
            print(f"{case.name:58} {sizes}  {error:+7.1%}", flush=True)
    for line in found:
        print(json.dumps({"measurement": "memory", **line}))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
