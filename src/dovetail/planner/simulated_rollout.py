"""Simulates generation and scoring of an iteration of a candidate event by event, with the simulator of inter-stage
fusion and the samples' own lengths, and draws iterations at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from dovetail.fusion.decode import Decode
from dovetail.fusion.scorer_queues import SimulatedScorer, Together, score
from dovetail.fusion.stage import gather
from dovetail.planner.candidate import INFERENCE, Candidate, Share, Task
from dovetail.planner.lags import DrawnIterations, Parts
from dovetail.planner.seconds import GPUCosts, pass_seconds, shared_prompt


class Bar(NamedTuple):
    """A span of work of one GPU of a pool. Times are seconds since the iteration began."""

    pool: str
    gpu: int
    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Rolled:
    """`generated`, `scored`: when all samples are generated, and when all are scored. `migrated`: the number of samples
    that moved when the tail gathered. `bars`: what each GPU does. `half`: when half of the servers are no longer
    needed, if the others take what is left. `kept`: the mean fraction of the samples that is left after that. Times are
    seconds since the stage began."""

    generated: float
    scored: float
    migrated: int
    bars: list[Bar]
    half: float
    kept: float

    def busy(self, shares: Sequence[Share]) -> float:
        """The fraction of the stage in which the GPUs of these shares generate or score, as the mean over the GPUs."""
        gpus = {(share.pool, gpu) for share in shares for gpu in share.range}
        worked = sum(bar.end - bar.start for bar in self.bars if (bar.pool, bar.gpu) in gpus)
        return min(1.0, worked / len(gpus) / self.scored) if self.scored else 1.0


def play_rollout(candidate: Candidate, costs: GPUCosts, prompts: Sequence[int], lengths: Sequence[int]) -> Rolled:
    """Simulates generation and inference of one iteration. `prompts`, `lengths`: the tokens of each sample's prompt and
    response."""
    _, rooms = costs.memory.of(candidate)
    longest, migration = costs.work.longest, candidate.migration
    fused = migration is not None
    servers = [
        (share, d, costs.servers("generation", share, max(rooms[share], longest)).profile)
        for share in candidate.generation
        for d in range(share.dp)
    ]
    decode = Decode(lengths, prompts, [profile for *_, profile in servers])
    moved = gather(decode, None if migration is None else int(migration * len(lengths)), longest)
    ends, idle, generated = decode.end, decode.idle_at, max(decode.end)
    bars, free = list[Bar](), dict[tuple[str, int], float]()
    for (share, d, _), end in zip(servers, idle, strict=True):
        for gpu in _gpus(share, d):
            bars.append(Bar(share.pool, gpu, "vLLM", "generation", 0.0, end))
            free[share.pool, gpu] = end if fused else generated
    scorers, names = list[SimulatedScorer[tuple[str, int]]](), list[str]()
    for task, share in _scoring(candidate):
        for d in range(share.dp):
            trains = task == "actor_training"  # the actor's own pass waits for all samples
            gpus = [(share.pool, gpu) for gpu in _gpus(share, d)] if trains else _places(candidate, share, d)
            seconds, begin = _pass_of(costs, task, share, prompts), generated if trains or not fused else 0.0
            scorers.append(SimulatedScorer(task, gpus, seconds, begin, rows=share.micro_batch))
            names.append("actor" if trains else task)
            free |= {gpu: free.get(gpu, 0.0) for gpu in gpus}
    coming = sorted((end, prompts[i] + lengths[i], i) for i, end in enumerate(ends))
    passes = score(scorers, coming, free)
    for each in passes:
        bars += [Bar(*gpu, "scorer", names[each.scorer], each.start, each.end) for gpu in scorers[each.scorer].devices]
    # Without fusion no sample moves, so the servers count, not the samples.
    half = sorted(ends)[len(ends) // 2] if migration else sorted(idle)[len(idle) // 2]
    left = sum(max(0.0, end - half) for end in ends) / len(ends)
    kept = left / (generated - half) if generated > half else 0.0
    scored = max([generated, *(each.scored for each in passes)])
    return Rolled(generated, scored, len(moved.moves) if moved else 0, bars, half, kept)


def _scoring(candidate: Candidate) -> list[tuple[Task, Share]]:
    """The tasks that score, with their shares. The actor's trainers do if the old log-probabilities are not folded."""
    tasks: tuple[Task, ...] = INFERENCE if candidate.folded else (*INFERENCE, "actor_training")
    return [(task, share) for task in tasks for share in candidate.shares(task)]


def _pass_of(
    costs: GPUCosts, task: Task, share: Share, prompts: Sequence[int]
) -> Callable[[Together], tuple[float, float]]:
    """The seconds of a pass in the slowest stage, and in all stages."""
    model, pool = costs.work.needed(task), costs.inventory[share.pool]
    # A trainer computes a prompt for each of its samples.
    saved = 1 - shared_prompt(costs.work, share.pp) if task in INFERENCE else 0.0

    def seconds(batch: Together) -> tuple[float, float]:
        context = sum(tokens for tokens, _ in batch) / share.micro_batch
        tokens = context - saved * sum(prompts[i] for _, i in batch) / share.micro_batch
        stage, gather, hop = pass_seconds(*model, share, pool, tokens, context / 2)
        busy = max(stage, gather)
        return busy, busy + (share.pp - 1) * (busy + hop)

    return seconds


def _places(candidate: Candidate, share: Share, copy: int) -> list[tuple[str, int]]:
    """The GPUs of one copy of an inference share, as (pool, index)."""
    server = next((s for s in candidate.generation if candidate.beside and s.overlaps(share)), None)
    if server is None:
        return [(share.pool, gpu) for gpu in _gpus(share, copy)]
    number = (share.first - server.first) // (server.pp * server.tp) + copy
    return [(share.pool, gpu) for gpu in _gpus(server, number)[: share.pp * share.tp]]


def _gpus(share: Share, copy: int) -> list[int]:
    """The GPUs of data-parallel copy `copy`. The rank of stage p, copy d and tensor-parallel rank t is
    (p * dp + d) * tp + t."""
    return [
        share.first + (stage * share.dp + copy) * share.tp + t for stage in range(share.pp) for t in range(share.tp)
    ]


# The number of iterations that are drawn.
DRAWS = 4


def _played(candidate: Candidate, costs: GPUCosts, seed: int) -> Iterator[tuple[Sequence[int], Sequence[int], Rolled]]:
    """Prompt and response lengths of iterations, and their generation and scoring, event by event."""
    work, rng = costs.work, Random(seed)
    for _ in range(DRAWS):
        prompts = work.prompt.draw(work.batch, rng)
        responses = work.response.draw(work.batch, rng)
        yield prompts, responses, play_rollout(candidate, costs, prompts, responses)


def drawn_on_gpus(candidate: Candidate, costs: GPUCosts, seed: int) -> DrawnIterations:
    """Iterations whose generation and scoring are scaled so that their means are those of the estimate. The time of
    training is in proportion to its tokens. With a lag the trainers recompute the old log-probabilities."""
    inference = costs.estimate(candidate).phases["inference"]
    candidate = replace(candidate, folded=True)
    mean = costs.estimate(candidate).phases
    played = list(_played(candidate, costs, seed))
    tokens = _relative([float(sum(prompts) + sum(responses)) for prompts, responses, _ in played])
    generated = _relative([rolled.generated for _, _, rolled in played])
    scored = _relative([rolled.scored - rolled.generated for _, _, rolled in played])
    own = max(costs.inference("actor_training", share) for share in candidate.actor_training)
    hidden = 0.0
    if candidate.migration is not None:
        hidden = costs.estimate(replace(candidate, migration=None)).phases["inference"] - mean["inference"]
    synchronous, lagged = [], []
    for at, (_, _, rolled) in enumerate(played):
        made = {
            "transfer": mean["transfer"],
            "swap": mean["swap"],
            "generation": mean["generation"] * generated[at],
            "inference": mean["inference"] * scored[at],
        }
        training = mean["training"] * tokens[at]
        rest = (made["generation"] + made["inference"]) * (1 - rolled.busy(candidate.generation))
        alone = {**made, "inference": inference * scored[at]}
        synchronous.append(Parts(alone, {"training": training}, rest + alone["inference"] - made["inference"]))
        tail = made["generation"] * (1 - rolled.half / rolled.generated) if rolled.generated else 0.0
        # Scoring on free servers in the tail takes their time too.
        kept = min(1.0, rolled.kept + max(0.0, hidden) / tail) if tail else 0.0
        lagged.append(Parts(made, {"training": training + own}, rest, tail=tail, kept=kept))
    return DrawnIterations(synchronous, lagged)


def _relative(values: Sequence[float]) -> list[float]:
    """The values as multiples of their mean."""
    mean = sum(values) / len(values)
    return [value / mean if mean else 1.0 for value in values]
