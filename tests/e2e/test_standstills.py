"""The sentence on who waits for whom, in a job whose processes stand still one after the other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.launch.local.launcher import Launcher
from dovetail.manifest.types import RLHFJob
from helpers.jobs import MANIFEST, Watcher, children_of, events, in_phase, read_status, run_job, untrained
from helpers.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# What stands still as long as a file is there: a call of the reward function, and rank 1 in its loss. That is also
# tried before the ranks meet.
HANGS = """
import pathlib, time
import torch.distributed as dist

def hang(name):
    while pathlib.Path("{folder}", name).exists():
        time.sleep(0.1)

def score(prompts, responses, **fields):
    hang("reward")
    return [len(set(text)) / 40 for text in responses]

def loss(inputs):
    if dist.is_initialized() and dist.get_rank() == 1:
        hang("loss")
    return -inputs.advantages * (inputs.logprobs - inputs.old_logprobs).exp(), {{}}
"""


@dataclass
class Standstill:
    """Begins when the status is so, and ends when a sentence with `told` was logged. `begin` returns what ends it."""

    told: str
    when: Callable[[dict[str, Any]], bool]
    begin: Callable[[Launcher], Callable[[], None]]
    sentence: str = ""


def stopped(process: str, child: bool = False) -> Callable[[Launcher], Callable[[], None]]:
    def begin(launcher: Launcher) -> Callable[[], None]:
        pid = children_of(launcher.pids[process])[0] if child else launcher.pids[process]
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    return begin


def hanging(flag: Path) -> Callable[[Launcher], Callable[[], None]]:
    def begin(launcher: Launcher) -> Callable[[], None]:
        flag.touch()
        return flag.unlink

    return begin


@dataclass
class OneAfterTheOther(Watcher):
    run_dir: Path
    waiting: list[Standstill]
    told: list[str] = field(default_factory=list)
    _end: Callable[[], None] | None = None
    _since: float = 0.0

    def look(self, launcher: Launcher) -> None:
        status = read_status(launcher)
        if status is None or not self.waiting:
            return
        now = self.waiting[0]
        if self._end is None:
            if now.when(status):
                self._end, self._since = now.begin(launcher), time.monotonic()
            return
        said = [event["message"] for event in events(self.run_dir, "phase.stalled")]
        now.sentence = next((sentence for sentence in said if now.told in sentence), "")
        if now.sentence or time.monotonic() - self._since > PATIENCE:
            self.told.append(now.sentence or f"{now.told}: only {said}")
            self._end()
            self._end = None
            self.waiting.pop(0)


def test_the_sentence_names_what_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS.format(folder=tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    faults = [
        Standstill(
            "samples on rollouts-0; rollouts-0 has not reported", in_phase("generation", 1), stopped("rollouts-0")
        ),
        Standstill("the reward function score, which", in_phase("generation", 2), hanging(tmp_path / "reward")),
        Standstill("no token since", in_phase("generation", 3), stopped("rollouts-0", child=True)),
        Standstill("rollouts-0-scorer has not reported", in_phase("generation", 4), stopped("rollouts-0-scorer")),
        Standstill("trainer-1 has not reported", in_phase("training", 5), stopped("trainer-1")),
        Standstill("trainer-1 at dovetail.", in_phase("training", 6), hanging(tmp_path / "loss")),
    ]
    document = yaml.safe_load(MANIFEST)
    spec = document["spec"]
    del spec["reward"], spec["data"]["preferences"]
    spec["stages"] = ["sft", "ppo"]
    spec["models"]["reward"] = {"function": "hangs:score", "workers": 1, "timeoutSeconds": 3600}
    spec["evaluation"] = {"heldOut": 0}
    spec["sft"]["steps"] = 4
    spec["ppo"] |= {"iterations": 12, "advantage": "grpo", "samplesPerPrompt": 4, "loss": "hangs:loss"}
    del spec["ppo"]["criticOptimizer"]
    spec["groups"][1]["replicas"] = 1
    spec["failurePolicy"]["peerTimeoutSeconds"] = int(PATIENCE)
    job = RLHFJob.model_validate(document)
    run_dir = tmp_path / "run"
    watcher = OneAfterTheOther(run_dir, faults)
    outcome, told = run_job(job, run_dir, watcher)
    assert outcome.succeeded, (outcome.reason, told)
    assert len(watcher.told) == 6, watcher.told
    for sentence in watcher.told:
        assert "only" not in sentence, sentence
    hangs = watcher.told[-1]
    assert "trainer-1 at dovetail." in hangs.split(", trainer-0 at")[0], "the one that the other waits for comes first"
    assert "in gloo:" in hangs.split("trainer-0 at")[1], "and the collective that it waits in"
    assert told == [], "nothing was started again"
    assert untrained(run_dir) == []
