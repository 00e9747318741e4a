"""What a change may cost at most: `make budgets`. Figures are counts, or CPU time over that of an anchor in the same
run, so that they hold on any processor and under load. A change that needs more raises the budget here, and its commit
says why. Budgets of what is asked of a GPU are beside their tests, in tests/nullgpu, with the mark `budget` too."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.jobs import MANIFEST, events

pytestmark = [pytest.mark.slow, pytest.mark.budget]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SECONDS = 1200
TRAINER = {"name": "trainers", "roles": ["trainer"], "replicas": 1}
ROLLOUT = {"name": "rollouts", "roles": ["rollout"], "replicas": 1}

# What a healthy run has none of.
REPEATED = {
    *("sample.retried", "samples.lost", "request.failed", "reward.failed", "rank.failed", "rank.stuck"),
    *("trainers.recover", "trainers.lost", "weights.failed", "weights.relay_failed", "coordinator.unreachable"),
}
# A loss that tells what the trainer's process has used whenever it is called.
COUNTED = """
import json, resource
import torch

def loss(inputs):
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("{told}", "a") as file:
        file.write(json.dumps([used.ru_minflt, used.ru_maxrss]) + "\\n")
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.2))
"""
ITERATIONS, CALLS = 8, 4  # of the loss in an iteration: 16 samples, four in each micro-batch

# CPU time like that of a coordinator: JSON, small objects, and a dictionary. Prints seconds, the least of seven.
PLAIN_PYTHON = """
import json, time
def work():
    began, seen = time.process_time(), {}
    for number in range(300):
        line = json.dumps({"id": number, "tokens": list(range(60)), "numbers": [number / 7] * 60})
        for place, token in enumerate(json.loads(line)["tokens"]):
            seen[number, token] = [place]
    return time.process_time() - began
print(min(work() for _ in range(7)))
"""


def within(what: str, figure: float, budget: float) -> None:
    print(f"{what}: {figure:.4g} (budget {budget:g})")
    if figure > budget:
        pytest.fail(
            f"{what}: {figure:.4g}, over the budget of {budget:g}; make the change cheaper, or raise the budget in "
            "tests/budgets and say why in the commit",
            pytrace=False,
        )


def cpu_seconds(*command: str, cwd: Path) -> float:
    """User and system time of a command and the processes that it waited for. Fails the test if the command fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, env=ONE_THREAD, capture_output=True, text=True, timeout=SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(folder: Path, **spec: Any) -> tuple[Path, float]:
    """`dovetail run` of the tiny job in a folder: the run's folder and the CPU seconds of all its processes."""
    document = yaml.safe_load(MANIFEST)
    document["spec"] |= {
        name: {**document["spec"].get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in spec.items()
    }
    (folder / "job.yaml").write_text(json.dumps(document))
    used = cpu_seconds(str(Path(sys.executable).with_name("dovetail")), "run", "job.yaml", cwd=folder)
    return folder / "runs/tiny", used


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The anchor of a job: CPU seconds to import what it imports."""
    folder = tmp_path_factory.mktemp("imports")
    return min(cpu_seconds(sys.executable, "-c", "import torch, vllm", cwd=folder) for _ in range(2))


def test_the_coordinator_follows_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 samples of about 200 tokens from 16 emulated servers, twice."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from bench_coordinator import CountingLoop, Load, coordinate

    load = Load(samples=300, instances=16, step=0.003, mean=200)
    anchor = float(subprocess.check_output([sys.executable, "-c", PLAIN_PYTHON], timeout=SECONDS))
    found = []
    for number in range(2):
        with load.servers() as ports, asyncio.Runner(loop_factory=CountingLoop) as runner:
            found.append(runner.run(coordinate(tmp_path / str(number), ports, load)))
    least = {name: min(each[name] for each in found) for name in found[0]}
    within("coordinator: CPU for a sample of 200 tokens / CPU of the anchor", least["cpu_seconds"] / 300 / anchor, 0.1)
    within("coordinator: bytes received for a token", least["bytes_per_token"], 12)
    within("coordinator: memory for a sample, kB", least["memory_mb"] * 1000 / 300, 30)
    within("coordinator: retries", sum(each["retries"] for each in found), 0)


def test_a_rank_gets_its_part_of_a_batch() -> None:
    """256 samples for 8 ranks."""
    command = [sys.executable, str(BENCHMARKS / "bench_batches.py")]
    env = ONE_THREAD | {"RANKS": "8", "SAMPLES": "256", "SFT_TOKENS": "20000"}
    text = subprocess.check_output(command, env=env, text=True, timeout=SECONDS)
    _, built, sft, ppo = map(json.loads, text.splitlines())
    within("SFT: bytes sent to a rank for a token", 1e6 * sft["sent_mb"] / 8 / sft["tokens"], 6)
    within("PPO: bytes sent to all ranks / bytes of the batch", ppo["sent_mb"] / built["file_mb"], 1.9)
    within("PPO: memory that sending takes / bytes of the batch", ppo["peak_mb"] / built["file_mb"], 2)


def test_a_step_comes_soon(imports: float, tmp_path: Path) -> None:
    """A job of one SFT step, from the command to its end."""
    _, used = run(tmp_path, stages=["sft"], sft={"steps": 1}, groups=[TRAINER])
    within("CPU of a job of one step / CPU of importing torch and vLLM", used / imports, 5)


def test_a_job_repeats_nothing_and_keeps_its_memory(imports: float, tmp_path: Path) -> None:
    told = tmp_path / "used.jsonl"
    (tmp_path / "counted.py").write_text(COUNTED.format(told=told))
    run_dir, used = run(
        tmp_path,
        sft={"steps": 2},
        reward={"steps": 2},
        ppo={"iterations": ITERATIONS, "epochs": 1, "loss": "counted:loss"},
        groups=[TRAINER, ROLLOUT],
    )
    within("CPU of a tiny job / CPU of importing torch and vLLM", used / imports, 9)
    repeated = [each["event"] for name in REPEATED for each in events(run_dir, name)]
    within(" ".join(["retries and restarts in a healthy run", *repeated]), len(repeated), 0)
    calls = [json.loads(line) for line in told.read_text().splitlines()][-ITERATIONS * CALLS :]
    assert len(calls) == ITERATIONS * CALLS
    faults = calls[-1][0] - calls[2 * CALLS][0]
    within("page faults of a trainer in a step", faults / ((ITERATIONS - 2) * 2), 400)
    script = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    anchor = int(subprocess.check_output([sys.executable, "-c", script], env=ONE_THREAD, timeout=SECONDS))
    within("memory of a trainer / memory of a process that imported torch", calls[-1][1] / anchor, 2)
