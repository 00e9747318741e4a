"""Everything that can be measured on one GPU, each figure beside an anchor of the same run.

    python benchmarks/bench_gpu.py [--quick] [--groups training scoring | --part 1] [--seconds 1140] [--json FILE]

Groups run one after the other, each in a process of its own with a deadline: one that fails does not lose the others'
figures, and what it found before it failed stays. The group `device` always runs first: it measures what the GPU itself
reaches. Sizes follow from the device's memory. With --seconds, groups for which no time is left are named as left out;
--groups runs them later, and --json adds to what its file has. Nothing is read from outside; vLLM is measured where it
is installed. docs/gpus.md says how to run this from a plain checkout."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu.report import Report, read_lines, table
from gpu.scale import TINY, choose

# In order of worth, with the longest that each may take, seconds.
GROUPS = {
    "device": 60,
    "numbers": 120,
    "training": 420,
    "logprobs": 60,
    "optimizer": 90,
    "scoring": 120,
    "weights": 120,
    "iteration": 240,
    "predictions": 150,
    "pipeline": 90,
    "sleeping": 90,
    "checkpoints": 120,
    "job": 300,
    "quickstart": 400,
}
# What runs where a command may take ten minutes only: the groups of each of so many commands, in about equal times.
PARTS = (
    ("training", "logprobs", "optimizer"),
    ("scoring", "weights", "iteration", "predictions"),
    ("numbers", "pipeline", "sleeping", "checkpoints", "job", "quickstart"),
)
PART_SECONDS = 560.0
FAILED = 3


def child(name: str, scale: str, path: Path, log: Path, device: dict[str, float]) -> None:
    """Run a group in this process; the exit code says how it ended."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = FAILED
    # A forked process must make torch's pool of threads anew. Two threads that did so at once would end it.
    torch.set_num_threads(torch.get_num_threads())
    try:
        memory = torch.cuda.get_device_properties(0).total_memory if name == "device" else 0
        if memory:
            path.with_suffix(".device").write_text(json.dumps(about(memory)))
        # Before CUDA is used: some groups choose deterministic algorithms later, as trainer ranks do.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        chosen = TINY if scale == "tiny" else choose(int(device.get("memory") or memory), scale == "quick")
        importlib.import_module(f"gpu.{name}").run(chosen, Report(path, device))
        status = 0
    except BaseException as problem:
        traceback.print_exc()
        path.with_suffix(".reason").write_text(f"{type(problem).__name__}: {problem}".strip().splitlines()[0][:300])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: threads of torch's backends may wait there.
    os._exit(status)


def about(memory: int) -> dict[str, Any]:
    """The device and what runs on it."""
    import transformers

    return {
        "device": torch.cuda.get_device_name(0),
        "memory": memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def one_group(name: str, scale: str, folder: Path, device: dict[str, float], deadline: float) -> dict[str, Any]:
    """Run a group until its end or the deadline; what it found."""
    path = folder / f"{name}.jsonl"
    for old in folder.glob(f"{name}.*"):
        old.unlink()
    # Forked before anything of CUDA is used here: torch and transformers are imported once for all groups.
    process = get_context("fork").Process(target=child, args=(name, scale, path, folder / f"{name}.log", device))
    start = time.monotonic()
    process.start()
    found: dict[str, Any] = {"state": "done"}
    try:
        process.join(deadline)
        if process.is_alive():
            found = {"state": "late", "reason": f"not done within {deadline:.0f} s"}
        elif process.exitcode:
            told = path.with_suffix(".reason")
            reason = told.read_text() if told.exists() else f"the process ended with {process.exitcode}"
            found = {"state": "failed", "reason": reason}
    finally:  # also where this process is told to end: nobody else would end the group
        assert process.pid is not None
        try:
            os.killpg(process.pid, 9)  # and what it started
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.join()
    figures, skipped = read_lines(path)
    return found | {"seconds": time.monotonic() - start, "figures": figures, "skipped": skipped}


def main(argv: list[str] | None = None) -> int:
    """1 if a group failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    chosen.add_argument(
        "--part", type=int, choices=range(1, len(PARTS) + 1), help="a third of the groups in ten minutes"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, in a few minutes")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for the null GPU
    parser.add_argument("--seconds", type=float, help="for everything (default: 1140; of a part 560)")
    parser.add_argument("--json", type=Path, help="write the figures there; groups in the file that do not run stay")
    parser.add_argument("--logs", type=Path, help="keep what the groups print in this folder")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    groups = PARTS[options.part - 1] if options.part else options.groups
    end = time.monotonic() + (options.seconds or (PART_SECONDS if options.part else 1140.0))
    scale = "tiny" if options.tiny else "quick" if options.quick else "whole"
    import transformers.models.llama.modeling_llama  # noqa: F401 - once for all groups

    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"groups": {}}
    folder = options.logs or Path(tempfile.mkdtemp(prefix="dovetail-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    device: dict[str, Any] = {}
    failed = False
    for name in ["device", *(each for each in GROUPS if each in groups and each != "device")]:
        left = end - time.monotonic()
        if left < min(20, GROUPS[name]):
            known["groups"].setdefault(name, {"state": "left out", "seconds": 0.0, "figures": [], "skipped": []})
            continue
        found = one_group(name, scale, folder, device, min(GROUPS[name], left))
        if name == "device":
            told = folder / "device.device"
            if not told.exists():
                print(f"no GPU: {found.get('reason', 'CUDA does not answer')}", file=sys.stderr)
                return 1
            known |= json.loads(told.read_text()) | {"scale": scale}
            device = {each["name"]: each["value"] for each in found["figures"]} | {"memory": known["memory"]}
        failed = failed or found["state"] != "done"
        known["groups"][name] = found
        print(table({name: found}) + "\n", flush=True)
        if found["state"] == "failed":
            print("\n".join((folder / f"{name}.log").read_text().splitlines()[-15:]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(known, indent=1) + "\n")
        if name == "device" and failed:
            return 1
    print(f"\n{known['device']}, torch {known['torch']}, Python {known['python']}, sizes: {scale}\n")
    print(table(known["groups"]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
