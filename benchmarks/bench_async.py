"""Iterations with and without a lag (`ppo.lag`): generation beside training, against one after the other.

    python benchmarks/bench_async.py [--instances 32] [--lags 1 2] [--training 1.0]
    python benchmarks/bench_async.py --real [--rounds 2]
    python benchmarks/bench_async.py --curves [--seeds 3]

The coordinator's own loop and protocols, over rollouts, scorers and trainers in another process that
wait as long as a profile says. The rollouts are those of bench_interstage.py: LLaMA-33B on eight H100, 16 samples each,
long-tailed lengths. The trainers take `--training` times as long as generation does alone, in proportion to an
iteration's tokens. A version of the weights takes `--weights` of that time to arrive. Everything takes `--slow` times
as long as there, against the noise of a busy machine. The planner predicts each lag from what the run without a lag has
measured: steps, scoring, weights, training, and what the coordinator needs besides.

With --real whole jobs run on this machine: vLLM servers, scorers and trainers of a small model. With lag 1 one job only
computes, so two busy cores gain nothing; the other one sleeps in its reward and advantage functions.

With --curves tiny jobs learn for as many steps with each lag. A line has the rewards of the last iterations, and
whether they are within the seeds' noise of those without a lag.

A JSON line a lag: `seconds` of an iteration, `speedup` over lag 0, `trainer_idle`: share of the time in which the
trainers do not train, `rollout_idle`: in which a rollout neither generates nor scores nor takes weights; each with what
was predicted. The first iterations and the last do not count."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asynchronous.curves import compare_curves
from asynchronous.json_lines import print_line
from asynchronous.real import compare
from asynchronous.run import Job, Ran, run
from asynchronous.world import length_of
from bench_interstage import device

from dovetail.fusion.profile import StageProfile
from dovetail.fusion.stage import StagePrediction, scan
from dovetail.planner.lags import Parts, play

SAMPLES, PROMPT = 16, 20
# Iterations before and after those that count: samples and training come into step, and the last have no samples
# beside them.
BEFORE, AFTER = 3, 2


def job_of(
    count: int,
    tokens: int,
    iterations: int,
    training: float,
    weights: float,
    slow: float,
    samples: int = SAMPLES,
) -> Job:
    """`training`: seconds of a mean iteration's, by those of its generation; `weights` likewise."""
    size = count * samples
    lengths = [length_of(seed, tokens) for seed in range(4 * size)]
    one = device(0.3, slow, lengths[:size], count)
    alone = scan(lengths[:size], [PROMPT] * size, [one] * count, [None], tokens)[0].generation_seconds
    mean = statistics.fmean(lengths) + PROMPT
    total = BEFORE + iterations + AFTER
    return Job(count, samples, tokens, total, one, weights * alone, training * alone / (size * mean))


def parts(job: Job, ran: Ran, known: StageProfile, lag: int) -> list[Parts]:
    """Each iteration of the job, by what a run without a lag tells: `known` of an instance, and the other phases. With
    a `lag` the tail gathers for the next iteration's sake, and free scorers score."""
    first, last = BEFORE + 1, job.iterations
    made = [job.lengths(i) for i in range(1, job.iterations + 1)]
    sizes = [sum(lengths) + sum(prompts) for lengths, prompts in zip(made, ran.prompts, strict=True)]
    each_token = sum(row["seconds_training"] for row in ran.metrics[first - 1 :]) / sum(sizes[first - 1 :])
    weights, other = ran.mean("seconds_weights", first, last), ran.mean("seconds_other", first, last)
    found = []
    for lengths, prompts, size, rule in zip(made, ran.prompts, sizes, ran.rules, strict=True):
        threshold, roomy = (0, False) if lag else rule
        profiles = [known] * job.instances
        stage = scan(lengths, prompts, profiles, [threshold], job.max_tokens, [roomy])[0]
        inference = stage.fused_seconds - stage.generation_end
        half = next(time for time, left in stage.tail if left <= len(lengths) / 2)
        found.append(
            Parts(
                {"transfer": weights, "generation": stage.generation_end, "inference": inference},
                {"training": size * each_token, "other": other},
                statistics.fmean(stage.idle_seconds),
                tail=stage.generation_end - half,
                kept=_kept(stage, half),
            )
        )
    return found


def _kept(stage: StagePrediction, half: float) -> float:
    """The share of the servers' time that an iteration needs from `half` to the end of generation: for the samples that
    are left, and for those that are scored meanwhile."""
    left = statistics.fmean(max(0.0, time - half) for time, _ in stage.tail)
    exposed = stage.fused_seconds - stage.generation_end
    scored = max(0.0, stage.serial_seconds - stage.generation_seconds - exposed)
    return min(1.0, (left + scored) / (stage.generation_end - half)) if stage.generation_end > half else 0.0


def emulate(job: Job, lags: Sequence[int]) -> list[dict[str, Any]]:
    """A run for each lag, the first without one; prints and returns a line for each. The first run tells what is
    expected of all, and the others are compared with it."""
    lines: list[dict[str, Any]] = []
    reference: Ran | None = None
    for lag in [0, *(each for each in lags if each)]:
        first, last = BEFORE + 1, job.iterations - AFTER
        with tempfile.TemporaryDirectory() as folder:
            ran = run(job, lag, Path(folder) / "run")
        reference = reference or ran
        predicted = play(parts(job, reference, reference.known, lag), lag, None, first, last, job.iterations)
        trainers, rollouts = ran.idle(first, last)
        line: dict[str, Any] = {
            "measurement": "async emulated",
            "lag": lag,
            "instances": job.instances,
            "seconds": ran.seconds(first, last),
            "predicted_seconds": predicted.seconds,
            "trainer_idle": trainers,
            "rollout_idle": rollouts,
            "training_left": ran.mean("seconds_training", first, last),
            "predicted_trainer_idle": predicted.trainer_idle,
            "predicted_rollout_idle": predicted.rollout_idle,
        }
        plain = lines[0] if lines else line
        line |= {
            "speedup": plain["seconds"] / line["seconds"],
            "predicted_speedup": plain["predicted_seconds"] / line["predicted_seconds"],
        }
        lines.append(line)
        print_line(line)
    return lines


def main(argv: list[str] | None = None) -> int:
    """0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=32)
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--iterations", type=int, default=6, help="that count")
    parser.add_argument("--training", type=float, default=1.0, help="times the seconds of generation")
    parser.add_argument("--weights", type=float, default=0.02, help="times the seconds of generation")
    parser.add_argument("--real", action="store_true", help="real vLLM servers on this machine, lags 0 and 1")
    parser.add_argument("--curves", action="store_true", help="learning curves of real jobs with each of --lags")
    parser.add_argument("--seeds", type=int, default=3, help="of --curves")
    parser.add_argument("--rounds", type=int, default=2, help="of --real")
    parser.add_argument("--slow", type=float, default=4.0, help="times the profile's durations")
    options = parser.parse_args(argv)
    if options.real:
        compare(options.rounds)
        return 0
    if options.curves:
        compare_curves([0, *options.lags], options.seeds)
        return 0
    told = options.instances, options.tokens, options.iterations, options.training, options.weights, options.slow
    emulate(job_of(*told), options.lags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
