"""Simulates generation and inference of one iteration, one after the other and fused, to see how much time a threshold
saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dovetail.fusion.decode import Decode
from dovetail.fusion.migration import MigrationPlan, plan_migration
from dovetail.fusion.profile import STREAMED_PER_SCORER, ProfileError, StageProfile
from dovetail.fusion.scorer_queues import SimulatedScorer, Together, score


def ratio(serial: float, fused: float) -> float:
    """The speed-up. It is 1 for a stage that takes no time."""
    return serial / fused if fused else 1.0


@dataclass(frozen=True)
class StagePrediction:
    """The prediction of one stage. The stage ends when every sample is scored and every instance can generate again.
    Times are seconds since the stage began.

    `serial_seconds`, `fused_seconds`: the duration of the serial and of the fused stage. `generation_seconds`,
    `generation_end`: when generation ends in the serial and in the fused stage. `moves`: by sample, the one of the
    `destinations` to which it moved. `idle_seconds`: the time in which each instance neither generates nor scores in
    the fused stage. `tail`: points (time, samples not yet generated) of the fused stage."""

    threshold: int | None
    serial_seconds: float
    fused_seconds: float
    generation_seconds: float
    generation_end: float
    destinations: tuple[int, ...]
    moves: dict[int, int]
    idle_seconds: tuple[float, ...]
    tail: tuple[tuple[float, int], ...]

    @property
    def migrated(self) -> int:
        return len(self.moves)


def scan(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    profiles: Sequence[StageProfile],
    thresholds: Iterable[int | None],
    max_tokens: int | None = None,
    roomy: Iterable[bool] = (),
) -> list[StagePrediction]:
    """Simulates one iteration of N samples with each of several thresholds. Returns the predictions in their order. The
    part that all have in common is simulated once.

    `lengths` (N,), `prompt_lengths` (N,): tokens. `profiles`: one for each instance. `thresholds`: the number of
    unfinished samples at which these migrate. 0: none migrates. None: inference follows generation. `max_tokens`: the
    most tokens of a response. The KV cache keeps room for them. By default it is the longest of `lengths`. `roomy`: for
    each threshold, whether the destinations take all samples that they have room for (`StageProfile.roomy`). By default
    they do not.

    Raises ProfileError for numbers that are impossible."""
    thresholds = list(thresholds)
    wide = list(roomy) or [False] * len(thresholds)
    _check(lengths, prompt_lengths, profiles, thresholds)
    lengths, prompts = [int(n) for n in lengths], [int(n) for n in prompt_lengths]
    longest = max(prompts) + max(max_tokens or 0, max(lengths))
    # One undisturbed generation goes through all thresholds, from the earliest migration to the latest.
    base = Decode(lengths, prompts, profiles)
    started: dict[int, Decode] = {}
    for remaining in sorted({t for t in thresholds if t is not None}, reverse=True):
        base.run(remaining)
        started[remaining] = base.copy()
    base.run(0)
    serial = _inference(base, fused=False)
    results = []
    for threshold, with_room in zip(thresholds, wide, strict=True):
        decode, scored, plan = base, serial, None
        if threshold is not None:
            decode = started[threshold].copy()
            plan = gather(decode, threshold, longest, [p.roomy() for p in profiles] if with_room else None)
            scored = _inference(decode, fused=True)
        ends, (end, scoring) = sorted(decode.end), scored
        results.append(
            StagePrediction(
                threshold,
                serial_seconds=serial[0],
                fused_seconds=end,
                generation_seconds=max(base.end),
                generation_end=ends[-1],
                destinations=plan.destinations if plan else (),
                moves=plan.moves if plan else {},
                idle_seconds=tuple(max(0.0, end - a - b) for a, b in zip(decode.busy, scoring, strict=True)),
                tail=tuple((end, len(ends) - k - 1) for k, end in enumerate(ends)),
            )
        )
    return results


def gather(
    decode: Decode, threshold: int | None, longest: int, destinations: Sequence[StageProfile] | None = None
) -> MigrationPlan[int, int] | None:
    """Generates all samples. When at most `threshold` are left, they migrate as soon as they fit on fewer instances, as
    the coordinator does. Returns the migration. None if there was none. `longest`: the most tokens of a sample.
    `destinations`: the instances as they take samples of others. By default they are `decode.profiles`."""
    plan = None
    if threshold is not None:
        decode.run(threshold)
        plan = _gathered(decode, longest, destinations or decode.profiles)
        if plan is not None:
            decode.migrate(plan.moves)
    decode.run(0)
    return plan


def _gathered(decode: Decode, longest: int, destinations: Sequence[StageProfile]) -> MigrationPlan[int, int] | None:
    """Go on until the samples that are left fit on fewer instances. None if they never do."""
    if len(destinations) == 1:
        return None
    profiles = dict(enumerate(destinations))
    slots = [p.slots(longest) for p in destinations]
    # If no instance has more samples than slots, more samples than this cannot fit on fewer instances.
    room = sum(slots) - min(slots)
    while decode.remaining:
        plan = plan_migration(decode.unfinished(), profiles, longest)
        if plan is not None:
            return plan
        decode.run(min(room, decode.remaining - max(1, decode.remaining // 100)))
    return None


def _inference(decode: Decode, fused: bool) -> tuple[float, list[float]]:
    """Simulates scoring on the instances that are free. Finished samples are scored, and the parts of unfinished ones
    that are generated so far. Returns when all is done, and how long each instance was busy with it.

    `fused`: an instance is free once it has nothing left to generate. Otherwise scoring begins after generation."""
    generated = max(decode.end)
    free = {
        i: (decode.idle_at[i] if fused else generated) + profile.swap_in_seconds
        for i, profile in enumerate(decode.profiles)
    }
    scorers = [
        SimulatedScorer("", (i,), _batch_seconds(p), least=p.batch_tokens) for i, p in enumerate(decode.profiles)
    ]
    end, busy = generated, [0.0] * len(decode.profiles)
    for each in score(scorers, _parts(decode, min(free.values()) if fused else None), free):
        profile = decode.profiles[each.scorer]
        busy[each.scorer] = (busy[each.scorer] or profile.swap_in_seconds + profile.swap_out_seconds) + each.seconds
        end = max(end, each.scored)
    return end, busy


def _batch_seconds(profile: StageProfile) -> Callable[[Together], tuple[float, float]]:
    def seconds(batch: Together) -> tuple[float, float]:
        alone = profile.batch_seconds([tokens for tokens, _ in batch])
        return alone, alone + profile.swap_out_seconds

    return seconds


def _parts(decode: Decode, free: float | None) -> list[tuple[float, int, int]]:
    """The parts of samples that are scored, as (when the part is generated, its tokens, the sample), in the order of
    time. `free`: when the first instance may score. None: when all samples are generated.

    The last samples come in parts. The first part is what is generated when the first instance is free. Each following
    part is half of what is left, and the last one has no more than a block."""
    order = sorted(range(len(decode.end)), key=decode.end.__getitem__)
    block = min((p.block_tokens or 0 for p in decode.profiles), default=0)
    last = STREAMED_PER_SCORER * len(decode.profiles) if block and free is not None else 0
    parts = []
    for place, sample in enumerate(order, start=last - len(order)):
        end, seen, tokens = decode.end[sample], 0, decode.lengths[sample]
        before = decode.prompts[sample]
        if place >= 0 and free is not None and free < end:
            there = free
            while (left := tokens - seen) > block:
                # This assumes that a response grows evenly.
                grown = max(seen + left // 2 if seen else 0, int(tokens * there / end)) // block * block
                grown = max(seen + block, min(grown, (tokens - 1) // block * block))
                there = max(there, end * grown / tokens)
                parts.append((there, before + grown - seen, sample))
                before, seen = 0, grown
        parts.append((end, before + tokens - seen, sample))
    return sorted(parts)


def _check(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    profiles: Sequence[StageProfile],
    thresholds: Sequence[int | None],
) -> None:
    if not len(lengths) or len(lengths) != len(prompt_lengths):
        raise ProfileError(f"{len(lengths)} response and {len(prompt_lengths)} prompt lengths; give one a sample")
    if min(lengths) < 1 or min(prompt_lengths) < 1:
        raise ProfileError("a response or prompt length is below 1 token")
    if not profiles:
        raise ProfileError("profiles is empty; give one per instance")
    for threshold in thresholds:
        if threshold is not None and not 0 <= threshold <= len(lengths):
            raise ProfileError(f"threshold is {threshold}; it must be between 0 and the {len(lengths)} samples")
