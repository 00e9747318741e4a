"""Inter-stage fusion: the stage simulated, by hand and by property; destinations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.coordinator.samples.fusion.measurements import Measurements, rising
from dovetail.coordinator.samples.fusion.threshold import ThresholdController
from dovetail.fusion.decode import Decode
from dovetail.fusion.migration import plan_migration
from dovetail.fusion.profile import ProfileError, StageProfile
from dovetail.fusion.stage import StagePrediction, _parts, scan

# One second a step whatever the batch, prompts for free.
PLAIN = StageProfile(((1, 1.0), (8, 1.0)), 0.0, 0.5, max_samples=8, saturation=4, batch_tokens=1)


def profile(**changes: Any) -> StageProfile:
    return replace(PLAIN, **changes)


def simulate(
    lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    profiles: Sequence[StageProfile],
    threshold: int | None,
) -> StagePrediction:
    return scan(lengths, prompt_lengths, profiles, [threshold])[0]


@st.composite
def stages(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    prompts = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    profiles = [
        StageProfile(
            ((1, draw(st.floats(0.1, 2))), (draw(st.integers(2, 8)), draw(st.floats(0.1, 4)))),
            draw(st.floats(0, 0.1)),
            draw(st.floats(0, 0.5)),
            draw(st.floats(0, 1)),
            draw(st.floats(0, 5)),
            draw(st.floats(0, 5)),
            max_samples=draw(st.integers(1, 12)),
            kv_tokens=draw(st.none() | st.integers(1, 300)),
            migration_seconds=draw(st.floats(0, 3)),
            kv_transfer_seconds_per_token=draw(st.none() | st.floats(0, 0.1)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return {"lengths": lengths, "prompt_lengths": prompts, "profiles": profiles}


def test_one_stage_after_the_other_by_hand() -> None:
    # Dealt in turn: (3, 5) and (9, 1) tokens, the first of each from the prefill. 9 tokens: 8 steps. Then 4 x 1 prompt
    # tokens and 18 response tokens at 0.5 s on two instances, longest first: 5 | 3 + 2, and the last one: 1 + 5.
    result = simulate([3, 9, 5, 1], [1, 1, 1, 1], [PLAIN, PLAIN], None)
    assert result.generation_seconds == result.generation_end == 8.0
    assert result.serial_seconds == result.fused_seconds == 8.0 + 6.0
    assert result.tail == ((0.0, 3), (2.0, 2), (4.0, 1), (8.0, 0))
    assert (result.migrated, result.destinations) == (0, ())
    # The first instance decodes for 4 s and scores for 5 or 6; the second decodes for 8.
    assert sum(result.idle_seconds) == pytest.approx(28 - 4 - 8 - 11)


def test_prefill_swaps_and_a_full_server_by_hand() -> None:
    one = profile(prefill_seconds_per_token=0.1, swap_in_seconds=2.0, swap_out_seconds=1.0, max_samples=2)
    # Two prompts of 10 tokens: 2 s, then 4 steps to the first's end; the third's prefill takes 1 s, in which the second
    # waits; it needs one more step.
    result = simulate([5, 6, 3], [10, 10, 10], [one], None)
    assert [t for t, _ in result.tail] == pytest.approx([6.0, 8.0, 9.0])
    assert result.serial_seconds == pytest.approx(9.0 + 2.0 + 0.5 * (30 + 14) + 1.0)
    assert result.idle_seconds == pytest.approx((0.0,))


def test_a_migration_by_hand() -> None:
    # At 4 s, sample 2 has ended and samples 1 and 3 (20 tokens) are left on different instances: 3 moves after 1.5 s,
    # joins at the step's end, 6 s, and lacks 15 tokens, as it had 5. One of them is from the new prefill.
    result = simulate([5, 20, 5, 20], [1] * 4, [PLAIN] * 4, 2)
    assert result.moves == {3: 1}
    assert result.destinations == (1,)
    assert result.generation_end == 19.0
    late = simulate([5, 20, 5, 20], [1] * 4, [profile(migration_seconds=1.5)] * 4, 2)
    assert late.generation_end == 6.0 + 14.0
    cost = simulate([5, 20, 5, 20], [1] * 4, [profile(prefill_seconds_per_token=1.0)] * 4, 2)
    assert cost.generation_end == 20.0 + 6.0, "the prompt and 5 tokens hold up the destination"
    moved = profile(prefill_seconds_per_token=1.0, kv_transfer_seconds_per_token=0.25)
    assert simulate([5, 20, 5, 20], [1] * 4, [moved] * 4, 2).generation_end == 20.0 + 1.5


def test_a_tail_that_does_not_fit_yet_gathers_once_it_does() -> None:
    # Room for one sample each: six samples on three instances fit on two once two are left.
    one = profile(saturation=1)
    result = simulate([3, 5, 9, 4, 20, 30], [1] * 6, [one] * 3, 6)
    assert len(result.destinations) == 2


def test_freed_instances_score_while_the_tail_is_generated() -> None:
    slow = profile(inference_seconds_per_token=1.0)
    lengths = [4, 4, 4, 4, 4, 40]
    result = simulate(lengths, [1] * 6, [slow, slow], 1)
    # Serial: 39 s, then 41 s on one instance, 25 on the other. Fused: 25 s from 3 s on, then 41 s from 39 s on.
    assert (result.serial_seconds, result.fused_seconds) == (80.0, 80.0)
    even = simulate([4, 4, 4, 4, 4, 20] * 2, [1] * 12, [slow] * 4, 2)
    assert even.fused_seconds < even.serial_seconds


def test_samples_are_scored_in_the_coordinators_batches() -> None:
    # Two batches of at least 10 tokens, 5 + 5 and 3 + 3 (the first one's share is less), each 2 s and 0.5 s a token.
    one = profile(batch_tokens=10, inference_seconds_per_batch=2.0)
    result = simulate([4, 2, 4, 2], [1] * 4, [one], None)
    assert result.serial_seconds - result.generation_seconds == 2 * 2.0 + 0.5 * 16


@pytest.mark.slow
@settings(deadline=None)
@given(stages(), st.data())
def test_every_sample_is_generated_once_where_the_plan_says(stage: dict[str, Any], data: st.DataObject) -> None:
    lengths, prompts, profiles = stage["lengths"], stage["prompt_lengths"], stage["profiles"]
    threshold = data.draw(st.integers(0, len(lengths)))
    result = simulate(**stage, threshold=threshold)
    assert [left for _, left in result.tail] == list(range(len(lengths)))[::-1]
    times = [time for time, _ in result.tail]
    assert times == sorted(times)
    assert times[-1] == result.generation_end <= result.fused_seconds
    assert result.migrated <= threshold
    assert set(result.moves.values()) <= set(result.destinations)
    assert len(result.idle_seconds) == len(profiles)
    # No instance generates faster than its fastest step allows, nor scores without time.
    fastest = min(p.steps[1] for p in profiles)
    assert result.generation_end >= fastest * (max(lengths) - 1) - 1e-9
    slowest = sum(n * max(p.steps) for n in lengths for p in profiles)
    prefill = sum(
        p.prefill_seconds_per_token * (a + b) for a, b in zip(lengths, prompts, strict=True) for p in profiles
    )
    assert result.generation_end <= slowest + 2 * prefill + 10
    assert result == simulate(**stage, threshold=threshold)


@pytest.mark.slow
@settings(deadline=None)
@given(stages(), st.data())
def test_a_scan_says_the_same_as_single_simulations(stage: dict[str, Any], data: st.DataObject) -> None:
    thresholds = data.draw(st.lists(st.none() | st.integers(0, len(stage["lengths"])), min_size=1, max_size=4))
    assert scan(**stage, thresholds=thresholds) == [simulate(**stage, threshold=t) for t in thresholds]


@pytest.mark.slow
@settings(deadline=None)
@given(stages(), st.integers(0, 40))
def test_no_destination_is_given_more_than_its_room(stage: dict[str, Any], remaining: int) -> None:
    lengths, prompts, profiles = stage["lengths"], stage["prompt_lengths"], stage["profiles"]
    decode = Decode(lengths, prompts, profiles)
    decode.run(remaining)
    unfinished = decode.unfinished()
    longest = max(prompts) + max(lengths)
    plan = plan_migration(unfinished, dict(enumerate(profiles)), longest)
    if plan is None:
        return
    assert sorted([*plan.destinations, *plan.freed]) == list(range(len(profiles)))
    assert plan.freed
    assert set(plan.moves) == {s for s, i in unfinished if i not in plan.destinations}
    loads = [sum(i == k for _, i in unfinished) for k in range(len(profiles))]
    for k in plan.destinations:
        arrived = sum(d == k for d in plan.moves.values())
        assert arrived == 0 or loads[k] + arrived <= profiles[k].slots(longest)
        assert loads[k] >= max(loads[f] for f in plan.freed)
    smaller = sum(max(0, profiles[k].slots(longest) - loads[k]) for k in plan.destinations[:-1])
    needed = len(unfinished) - sum(loads[k] for k in plan.destinations[:-1])
    assert len(plan.destinations) == 1 or smaller < needed, "one destination fewer would have held them"


def test_destinations_are_as_many_as_the_paper_says() -> None:
    unfinished = [(f"s{k}", f"r{k % 8}") for k in range(20)]
    names = [f"r{k}" for k in range(8)]
    plan = plan_migration(unfinished, dict.fromkeys(names, profile(saturation=8)), 100)
    assert plan is not None
    assert plan.destinations == ("r0", "r1", "r2")
    small = profile(saturation=8, kv_tokens=499)
    plan = plan_migration(unfinished, dict.fromkeys(names, small), 100)
    assert plan is not None
    assert len(plan.destinations) == 5
    assert plan_migration(unfinished, dict.fromkeys(names, profile(saturation=2)), 100) is None
    waiting = [("a", None), ("b", "r1"), ("c", "gone")]
    plan = plan_migration(waiting, dict.fromkeys(names, PLAIN), 100)
    assert plan is not None
    assert plan.destinations == ("r1",)
    assert plan.moves == {"a": "r1", "c": "r1"}


@pytest.mark.slow
@settings(deadline=None)
@given(stages(), st.integers(0, 60))
def test_longer_responses_never_end_generation_earlier(stage: dict[str, Any], more: int) -> None:
    """With room for all: the order in which samples wait for room can do anything."""
    roomy = [replace(p, max_samples=40, kv_tokens=None) for p in stage["profiles"]]
    lengths, prompts = stage["lengths"], stage["prompt_lengths"]
    before = simulate(lengths, prompts, roomy, None)
    after = simulate([lengths[0] + more, *lengths[1:]], prompts, roomy, None)
    assert after.generation_seconds >= before.generation_seconds - 1e-9
    slower = [replace(p, inference_seconds_per_token=2.0) for p in roomy[:1]]
    faster = [replace(p, inference_seconds_per_token=1.0) for p in roomy[:1]]
    assert simulate(lengths, prompts, slower, 0).fused_seconds > simulate(lengths, prompts, faster, 0).fused_seconds


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(stages())
def test_the_chosen_threshold_is_never_worse_than_off(stage: dict[str, Any]) -> None:
    controller = ThresholdController("Auto", 60)
    controller.observe(stage["lengths"])
    decision = controller.decide(stage["prompt_lengths"], stage["profiles"])
    assert decision.fused_seconds <= decision.serial_seconds
    if decision.threshold is None:
        assert decision.fraction is None
        assert decision.fused_seconds == decision.serial_seconds
    else:
        best = min(decision.scanned.values())
        assert decision.fused_seconds == decision.scanned[decision.fraction or 0.0]  # type: ignore[index]
        assert decision.fused_seconds <= best + 0.01 * decision.serial_seconds + 1e-9
    twin = ThresholdController("Auto", 60)
    twin.observe(stage["lengths"])
    assert twin.decide(stage["prompt_lengths"], stage["profiles"]) == decision
    for _ in range(5):
        controller.observe([3] * len(stage["lengths"]))
    later = controller.decide(stage["prompt_lengths"], stage["profiles"])
    assert later.fused_seconds <= later.serial_seconds, "what was in use is not kept at a loss"


def test_step_times_are_interpolated_and_never_fall() -> None:
    curve = StageProfile(((2, 1.0), (4, 3.0), (6, 2.0), (8, 5.0)), 0, 0, max_samples=10)
    assert curve.steps == pytest.approx((1, 1, 1, 2, 3, 3, 3, 4, 5, 6, 7))
    assert curve.bs_max == 2
    assert StageProfile(((4, 2.0),), 0, 0, max_samples=6).steps == pytest.approx((2, 2, 2, 2, 2, 2.5, 3))
    assert profile(kv_tokens=10).slots(100) == 1, "one sample is always taken"


def test_measurements_replace_what_was_assumed() -> None:
    found = Measurements(PLAIN)
    assert not found.measured
    assert found.profile() == PLAIN
    for batch, seconds in ((1, 0.010), (33, 0.013), (64, 0.022)):
        found.decoded(batch, 100, 100 * seconds)
    found.scored(2000, 1.0)
    found.prefilled(1000, 0.5)
    found.swapped_in(3.0)
    measured = found.profile()
    assert found.measured
    assert measured.steps[1] == pytest.approx(0.010)
    assert [s for _, s in measured.decode] == pytest.approx([0.010, 0.013, 0.022])
    assert (measured.inference_seconds_per_token, measured.swap_in_seconds) == pytest.approx((0.0005, 3.0))
    assert measured.prefill_seconds_per_token == pytest.approx(0.0005)
    assert measured.max_samples == PLAIN.max_samples
    found.scored(2000, 3.0)
    assert 0.0005 < found.profile().inference_seconds_per_token < 0.0015


def test_a_noisy_step_time_does_not_make_larger_batches_seem_slow() -> None:
    found = Measurements(PLAIN)
    for batch, seconds, steps in ((1, 0.0100, 100), (2, 0.0140, 5), (4, 0.0101, 100), (8, 0.0102, 100)):
        found.decoded(batch, steps, steps * seconds)
    assert replace(found.profile(), saturation=None).bs_max == 8
    assert [s for _, s in found.profile().decode] == pytest.approx([0.0100, 0.0102, 0.0102, 0.0102], abs=2e-4)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 5)), min_size=1, max_size=9))
def test_step_times_are_made_to_rise_by_pooling(points: list[tuple[float, float]]) -> None:
    made = rising([(b, s, w) for b, (s, w) in enumerate(points, 1)])
    assert [b for b, _ in made] == list(range(1, len(points) + 1))
    assert all(a <= b + 1e-9 for (_, a), (_, b) in pairwise(made))
    total = sum(s * w for s, w in points)
    assert sum(s * w for (_, s), (_, w) in zip(made, points, strict=True)) == pytest.approx(total)


def test_a_batches_fixed_cost_is_told_from_that_of_its_tokens() -> None:
    found = Measurements(PLAIN)
    for tokens in (500, 2000, 700, 4000) * 5:
        found.scored(tokens, 0.2 + 0.001 * tokens)
    fitted = found.profile()
    assert (fitted.inference_seconds_per_batch, fitted.inference_seconds_per_token) == pytest.approx((0.2, 0.001))
    alike = Measurements(PLAIN)
    for seconds in (1.0, 1.4):
        alike.scored(1000, seconds)
    assert alike.profile().inference_seconds_per_batch == 0
    assert alike.profile().inference_seconds_per_token == pytest.approx(0.0012, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": ()}, "decode has no points"),
        ({"decode": ((4, 1.0), (2, 1.0))}, "must be at least 1 and rise"),
        ({"decode": ((1, 0.0),)}, "above 0"),
        ({"swap_in_seconds": -1.0}, r"swap_in_seconds is -1.0; it must be 0 or more"),
        ({"max_samples": 0}, "max_samples is 0; it must be 1 or more"),
    ],
)
def test_bad_profiles_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profile(**changes)


@pytest.mark.parametrize(
    ("lengths", "prompts", "profiles", "threshold", "message"),
    [
        ([1], [1, 1], [PLAIN], 0, "1 response and 2 prompt lengths"),
        ([0], [1], [PLAIN], 0, "below 1 token"),
        ([1], [1], [], 0, "profiles is empty"),
        ([1], [1], [PLAIN], 2, "threshold is 2; it must be between 0 and the 1 samples"),
    ],
)
def test_bad_arguments_are_refused(
    lengths: list[int], prompts: list[int], profiles: list[StageProfile], threshold: int, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        simulate(lengths, prompts, profiles, threshold)


def test_a_sample_that_comes_in_parts_leaves_a_block_to_score_by_hand() -> None:
    # One instance decodes 64 tokens in 63 s; the other has 1 token, and is free at once. Scoring takes 0.5 s a token.
    lengths, prompts = [64, 1], [2, 1]
    whole = simulate(lengths, prompts, [PLAIN, PLAIN], 0)
    assert whole.fused_seconds == 63.0 + 0.5 * 66
    parts = simulate(lengths, prompts, [profile(block_tokens=8)] * 2, 0)
    # Parts end at tokens 8, 32, 48, 56 and 64; each is scored in at most as long as the next one takes to grow.
    assert parts.generation_end == 63.0
    assert parts.fused_seconds == 63.0 + 0.5 * 8
    assert parts.serial_seconds == whole.serial_seconds
    # Not where one of the scorers takes finished samples only, nor one stage after the other.
    assert simulate(lengths, prompts, [PLAIN, profile(block_tokens=8)], 0).fused_seconds == whole.fused_seconds
    assert simulate(lengths, prompts, [profile(block_tokens=8)] * 2, None).fused_seconds == whole.serial_seconds


@pytest.mark.slow
@given(stages(), st.integers(1, 30), st.data())
@settings(deadline=None)
def test_parts_are_all_tokens_and_work_is_the_same(stage: dict[str, Any], block: int, data: st.DataObject) -> None:
    stage["profiles"] = [replace(p, block_tokens=block, inference_seconds_per_batch=0.0) for p in stage["profiles"]]
    threshold = data.draw(st.integers(0, len(stage["lengths"])))
    found = simulate(threshold=threshold, **stage)
    assert found.fused_seconds >= found.generation_end
    decode = Decode(stage["lengths"], stage["prompt_lengths"], stage["profiles"])
    decode.run(0)
    for free in (0.0, max(decode.end) / 2):
        parts = _parts(decode, free)
        assert sum(tokens for _, tokens, _ in parts) == sum(stage["lengths"]) + sum(stage["prompt_lengths"])
        assert all(tokens > 0 for _, tokens, _ in parts)
        assert max(there for there, _, _ in parts) == max(decode.end)
