"""Rollouts that come and go: what a fleet of spot instances makes of its time.

    python benchmarks/bench_spot.py [--instances 16] [--noticed 0 0.5 1] [--life 300] [--seed 0]
    python benchmarks/bench_spot.py --trace FILE ...

The coordinator's own code and protocols over emulated instances (LLaMA-33B on eight H100 each, as in bench_interstage)
that start, get a notice and die as a trace says. The trace is drawn (lives exponential, `--life` seconds on average;
the next instance comes after `--gap`), or recorded (files of github.com/skypilot-org/spot-traces, one for each slot).
All times of the trace and of the profile are divided by `--scale`, so that a fast machine shows minutes in seconds;
figures are in the trace's own seconds. An instance that joins takes weights for `--weights` seconds first. One that
gets a notice works on until `--reserve` seconds are left. Then it leaves: its samples move, and it ends.

A JSON line for each share of deaths with a notice:

- `goodput`: tokens kept for each decode step and slot of the instances that were there, over the same without any
  death. Measured while there is work for all instances. The time until a joiner's first token and that of a leaver
  count as steps without tokens. Steps are counted and not their seconds, which grow on a busy machine.
- `twice`: the share of tokens that were made and not kept, so that they were made again.
- `same`: whether each response has the same tokens as without any death.
- `first_token_seconds`, `leave_seconds`: mean and longest time of a joiner from its weights to its first token, and of
  a leaver until no sample needs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench_interstage import MAX_TOKENS, PROMPT, device
from interstage.stage import alike, lengths_of
from spot.fleet import Servers, servers, token_at
from spot.trace import Life, drawn, recorded

from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.store.samples import State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.fusion.profile import StageProfile
from dovetail.manifest.training_types import Generation
from dovetail.protocol.messages import Register
from helpers.coordinated import NoWeights, drawn_with, job_of

VERSION = 1
WAIT = 600.0


@dataclass
class Run:
    """`steps`: of all instances with work for all. `kept`: tokens stored meanwhile. Times in the machine's seconds."""

    seconds: float = 0.0
    lived: float = 0.0
    steps: int = 0
    kept: int = 0
    made: int = 0
    stored: int = 0
    deaths: int = 0
    notices: int = 0
    first: list[float] = field(default_factory=list)
    leave: list[float] = field(default_factory=list)
    wrong: int = 0

    def rate(self, profile: StageProfile) -> float:
        """Tokens of a slot and step."""
        idle = (sum(self.first) + sum(self.leave)) / profile.steps[profile.max_samples]
        return self.kept / (self.steps + idle) / profile.max_samples


@dataclass(frozen=True)
class Settings:
    """Times in the machine's seconds. `reserve`: when a noticed instance leaves, before its death."""

    profile: StageProfile
    lengths: Sequence[int]
    weights: float
    reserve: float
    slots: int


class Spot(DrawingFollower):
    """One generation while instances come and go."""

    def __init__(self, settings: Settings, there: Servers, folder: Path) -> None:
        self._settings, self._servers = settings, there
        self.run = Run()
        self._store = Store(folder)
        self._store.samples.begin_iteration(1, alike(len(settings.lengths), PROMPT))
        self._ready: dict[str, float] = {}
        self._late: set[str] = set()
        self._saturated = True
        timeouts = Timeouts(suspect=WAIT, dead=WAIT, back_off=0.05, back_off_max=0.5)
        self._fleet = Fleet(time.monotonic, lambda event, **fields: None, timeouts)
        self._fleet.publish(VERSION)
        generation = Generation.model_validate({"maxTokens": MAX_TOKENS, "maxConcurrent": settings.profile.max_samples})
        job = job_of(self._store, spec=drawn_with(generation), start_seconds=600.0)
        self._generator = Generator(job, self._fleet, NoWeights(), "token")

    async def play(self, lives: Sequence[Life]) -> Run:
        """Raises RuntimeError unless every sample ends whole."""
        began = time.monotonic()
        acting = [asyncio.create_task(self._live(number, life, began)) for number, life in enumerate(lives)]
        try:
            async with self._generator:
                with self._generator.open(1, VERSION) as turn:
                    await self._generator.generate(turn, self)
        finally:
            for task in acting:
                task.cancel()
            ended = await asyncio.gather(*acting, return_exceptions=True)
        for end in ended:
            if isinstance(end, Exception):
                raise end
        run = self.run
        run.seconds = time.monotonic() - began
        told = self._servers.tell()
        run.made = told.made
        run.first = [at - self._ready[name] for name, at in told.began.items() if name in self._late]
        for seed, (sample, length) in enumerate(
            zip(self._store.samples.samples(1), self._settings.lengths, strict=True), start=1
        ):
            run.stored += len(sample.tokens)
            whole = [token_at(seed, i) for i in range(length)]
            run.wrong += sample.state is not State.GENERATED or sample.tokens.tolist() != whole
        self._store.close()
        return run

    async def _live(self, number: int, life: Life, began: float) -> None:
        name = f"r{number:04}"
        await asyncio.sleep(began + life.start - time.monotonic())
        port = self._servers.start(name)
        self._register(name, life.slot, port)
        await asyncio.sleep(self._settings.weights)
        self._fleet.weights_acked(name, name, VERSION)
        self._ready[name] = time.monotonic()
        if life.start > 0:
            self._late.add(name)
        if life.told is not None:
            await asyncio.sleep(began + max(life.told, life.death - self._settings.reserve) - time.monotonic())
            self.run.notices += 1
            self._fleet.retire(name)
            asked = time.monotonic()
            while not self._generator.left(name) and time.monotonic() < began + life.death:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self.run.leave.append(time.monotonic() - asked)
        else:
            await asyncio.sleep(began + life.death - time.monotonic())
        self._servers.kill(name)
        self.run.deaths += 1
        self.run.lived += time.monotonic() - self._ready[name]

    def _register(self, name: str, slot: int, port: int) -> None:
        message = {"name": name, "kind": "rollout", "group": f"slot-{slot}", "url": f"http://127.0.0.1:{port}"}
        message |= {"incarnation": name}
        self._fleet.register(Register.model_validate({**message, "ready": True, "abilities": {"sampler": "counter"}}))

    def progress(self, done: int, total: int, tokens: int) -> None:
        if self._saturated and total - done <= 2 * self._settings.slots * self._settings.profile.max_samples:
            self._saturated = False
            self.run.kept, self.run.steps = tokens, self._servers.tell().steps


def measure(settings: Settings, lives: Sequence[Life]) -> Run:
    """One run."""
    table = {seed + 1: length for seed, length in enumerate(settings.lengths)}
    with tempfile.TemporaryDirectory() as folder, servers(settings.profile, table, PROMPT) as there:

        async def play() -> Run:
            return await Spot(settings, there, Path(folder)).play(lives)

        return asyncio.run(play())


def scaled(lives: Sequence[Life], scale: float) -> list[Life]:
    """All times divided by `scale`."""
    shorter = []
    for life in lives:
        notice = None if life.notice is None else life.notice / scale
        shorter.append(replace(life, start=life.start / scale, death=life.death / scale, notice=notice))
    return shorter


def line(run: Run, calm: Run, noticed: float | None, scale: float, settings: Settings) -> dict[str, Any]:
    def times(found: Sequence[float]) -> list[float] | None:
        return [round(scale * statistics.fmean(found), 2), round(scale * max(found), 2)] if found else None

    return {
        "measurement": "spot",
        "instances": settings.slots,
        "samples": len(settings.lengths),
        "noticed": noticed,
        "seconds": round(scale * run.seconds, 1),
        "deaths": run.deaths,
        "mean_life_seconds": round(scale * run.lived / run.deaths, 1) if run.deaths else None,
        "goodput": round(run.rate(settings.profile) / calm.rate(settings.profile), 4),
        "twice": round(run.made / run.stored - 1, 5),
        "same": run.wrong == 0,
        "first_token_seconds": times(run.first),
        "leave_seconds": times(run.leave),
    }


def main(argv: list[str] | None = None) -> int:
    """1 if a response was not the same as without deaths, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--concurrent", type=int, default=16, help="samples at once on an instance")
    parser.add_argument("--rounds", type=int, default=32, help="samples, in so many times what all work on at once")
    parser.add_argument("--life", type=float, default=300.0, help="mean seconds from start to death")
    parser.add_argument("--gap", type=float, default=60.0, help="mean seconds until the next instance comes")
    parser.add_argument(
        "--noticed", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="share of deaths with a notice"
    )
    parser.add_argument("--reserve", type=float, default=15.0, help="seconds before its death at which one leaves")
    parser.add_argument("--weights", type=float, default=5.0, help="seconds until a joiner has weights")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times faster than the profile everything is")
    parser.add_argument("--trace", type=Path, nargs="+", help="recorded lives instead, a file for each instance")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not all(0 <= share <= 1 for share in options.noticed):
        parser.error("--noticed must be between 0 and 1")
    slots = len(options.trace) if options.trace else options.instances
    lengths = lengths_of(options.rounds * slots * options.concurrent, MAX_TOKENS, options.seed)
    profile = replace(device(0.3, 1 / options.scale, lengths, slots), max_samples=options.concurrent)
    times = (options.weights / options.scale, options.reserve / options.scale)
    settings = Settings(profile, lengths, *times, slots)
    for_ever = [Life(slot, 0.0, 1e9) for slot in range(slots)]
    calm = measure(settings, for_ever)
    print(json.dumps(line(calm, calm, None, options.scale, settings)), flush=True)
    wrong = calm.wrong
    for share in options.noticed:
        if options.trace:
            lives = recorded(options.trace, None if share == 0 else 120.0)
        else:
            longest = 20 * options.scale * calm.seconds
            lives = drawn(options.seed, slots, longest, options.life, options.gap, share)
        run = measure(settings, scaled(lives, options.scale))
        print(json.dumps(line(run, calm, share, options.scale, settings)), flush=True)
        wrong += run.wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
