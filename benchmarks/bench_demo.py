"""The quickstart with several seeds: what `make demo` reaches, and what it takes. A JSON line a seed.

CPU seconds are those of all processes of the run."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            cpu, clock = cpu_seconds(), time.monotonic()
            command = [str(Path(sys.executable).with_name("dovetail")), "run", str(ROOT / "examples/quickstart.yaml")]
            subprocess.run([*command, "--seed", str(seed), "--run-dir", folder], stdout=sys.stderr, check=True)
            told = json.loads((Path(folder) / "summary.json").read_text())
            ppo, quality = told["ppo"], told["evaluation"]["quality"]
            line = {
                "measurement": "demo",
                "seed": seed,
                "reward_first": ppo["reward_first"]["mean"],
                "reward_last": ppo["reward_last"]["mean"],
                "kl_last": ppo["kl_last"]["mean"],
                "quality_after_sft": quality["before_ppo"]["mean"],
                "quality_after_ppo": quality["after_ppo"]["mean"],
                "quality_ci95": quality["after_ppo"]["ci95"],
                "cpu_seconds": cpu_seconds() - cpu,
                "seconds": time.monotonic() - clock,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
