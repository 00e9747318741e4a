"""A drill: whole tiny jobs whose processes are frozen, killed and killed again while they recover, at random.

    make drill    or    PYTHONPATH=tests python -m helpers.drill --seconds 600 --seed 1

The job runs once in peace, then again and again under fire until the time is up. Every run must end with the weights
of the first, bit by bit, and leave no process behind. The last line is JSON: what was done, and how soon it was mended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.launch.local.launcher import Launcher
from helpers.jobs import children_of, run_job, same_weights, tiny_job, untrained

PEER_TIMEOUT_SECONDS = 15
# So many that a run lasts longer than its processes take to start.
ITERATIONS = 30
KINDS = ("freeze", "pause", "kill", "double kill", "kill in recovery")
SPAWNER_SHARE = 0.1
ENGINE = "'s engine core"


def drill_job(lag: int = 0) -> Any:
    """The tiny job of the tests; it may be restarted as often as it takes. `lag`: its `ppo.lag`."""
    policy = {"maxRestarts": 10_000, "peerTimeoutSeconds": PEER_TIMEOUT_SECONDS}
    return tiny_job(failurePolicy=policy, ppo={"iterations": ITERATIONS, "lag": lag})


def processes(launcher: Launcher) -> dict[str, int]:
    """Process ids of all that may be hit, by name: those of the job, engine cores, spawners."""
    found = {**launcher.pids, **launcher.spawner_pids}
    for name, pid in launcher.pids.items():
        if name.startswith("rollouts-") and not name.endswith("-scorer"):
            found |= {f"{name}{ENGINE}": child for child in children_of(pid)[:1]}
    return found


@dataclass
class Disturber:
    """To be called by the launcher all the time. `until`: when to leave the job in peace, on `clock`."""

    rng: random.Random
    until: float
    clock: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] = lambda line: None
    done: Counter[str] = field(default_factory=Counter)
    replaced_after: dict[str, list[float]] = field(default_factory=dict)
    _next: float = 0.0
    _later: list[tuple[float, int, int]] = field(default_factory=list)
    _again: list[tuple[str, int]] = field(default_factory=list)
    _gone: list[tuple[str, str, int, float]] = field(default_factory=list)

    def __call__(self, launcher: Launcher) -> None:
        now, there = self.clock(), processes(launcher)
        for due in [d for d in self._later if now >= d[0]]:
            self._later.remove(due)
            _send(*due[1:])
        for name, pid in [a for a in self._again if there.get(a[0], a[1]) != a[1]]:
            self._again.remove((name, pid))
            self._later.append((now + self.rng.uniform(0.0, 4.0), there[name], signal.SIGKILL))
        for name, kind, pid, since in [g for g in self._gone if there.get(g[0], g[2]) != g[2]]:
            self._gone.remove((name, kind, pid, since))
            self.replaced_after.setdefault(kind, []).append(now - since)
        if self._next == 0.0:
            self._next = now + self.rng.uniform(5.0, 15.0)
        elif self._next <= now < self.until and len(launcher.pids) > 2:
            # A spawner takes most of the job along: mostly others.
            spawners = launcher.spawner_pids
            hit_spawner = self.rng.random() < SPAWNER_SHARE
            self._disturb({n: pid for n, pid in there.items() if (n in spawners) == hit_spawner}, now)
            self._next = now + self.rng.uniform(3.0, 15.0)

    def _disturb(self, there: dict[str, int], now: float) -> None:
        kind = self.rng.choice(KINDS)
        names = self.rng.sample(sorted(there), min(2 if kind == "double kill" else 1, len(there)))
        self.done[kind] += 1
        self.tell(f"{kind}: {' and '.join(names)}")
        for name in names:
            pid = there[name]
            _send(pid, signal.SIGSTOP if kind in ("freeze", "pause") else signal.SIGKILL)
            if kind == "pause":
                self._later.append((now + self.rng.uniform(0.2, 0.7 * PEER_TIMEOUT_SECONDS), pid, signal.SIGCONT))
            else:
                self._gone.append((name, kind, pid, now))
            if kind == "kill in recovery":
                self._again.append((name, pid))


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def drill(folder: Path, seconds: float, seed: int, tell: Callable[[str], None], lag: int = 0) -> dict[str, Any]:
    """Runs the drill in `folder`, with a job of this `ppo.lag`; what it did. `different` names tensors that are not
    those of the undisturbed run."""
    job, rng = drill_job(lag), random.Random(seed)
    begun = time.monotonic()
    outcome, _ = run_job(job, folder / "peace", own_imports=True)
    assert outcome.succeeded, outcome.reason
    peace = time.monotonic() - begun
    tell(f"undisturbed: {peace:.0f} s")
    begun, rounds = time.monotonic(), []
    hand = Disturber(rng, begun + seconds, tell=lambda line: tell(f"{time.monotonic() - begun:6.1f} s  {line}"))
    different: list[str] = []
    failures: list[str] = []
    while time.monotonic() < begun + seconds:
        run, started = folder / f"round-{len(rounds) + 1}", time.monotonic()
        hand._again.clear(), hand._later.clear(), hand._gone.clear()
        outcome, told = run_job(job, run, hand, own_imports=True)
        rounds.append(round(time.monotonic() - started, 1))
        for line in told:
            tell(f"          {line[:160]}")
        if not outcome.succeeded:
            failures.append(outcome.reason)
            tell(f"FAILED: {outcome.reason}")
            continue
        wrong = same_weights(folder / "peace", run)
        different += [f"round {len(rounds)}: {name}" for name in wrong]
        tell(f"round {len(rounds)}: {rounds[-1]:.0f} s, {len(wrong)} tensors differ")
        failures += untrained(run)
        shutil.rmtree(run)
    means = {kind: round(sum(values) / len(values), 1) for kind, values in sorted(hand.replaced_after.items())}
    return {
        "seed": seed,
        "lag": lag,
        "peer_timeout_seconds": PEER_TIMEOUT_SECONDS,
        "seconds_undisturbed": round(peace, 1),
        "seconds_of_rounds": rounds,
        "disturbances": dict(hand.done),
        "mean_seconds_until_replaced": means,
        "failures": failures,
        "different": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="helpers.drill", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to disturb (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lag", type=int, default=0, help="the job's ppo.lag (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keep the run directories here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="dovetail-drill-"))
    try:
        facts = drill(folder, options.seconds, options.seed, lambda line: print(line, flush=True), options.lag)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(facts))
    return 1 if facts["different"] or facts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
