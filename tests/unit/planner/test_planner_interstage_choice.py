"""Which threshold is chosen: where fusion pays, pins, and servers whose steps grow with every sample."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.samples.fusion.threshold import ThresholdController
from dovetail.fusion.lengths import Lengths
from dovetail.fusion.profile import ProfileError, StageProfile


def gpu(**changes: Any) -> StageProfile:
    """Decoding hardly slower with a larger batch, inference about a third of the stage."""
    return StageProfile(((1, 0.02), (64, 0.022), (256, 0.04)), 2e-5, 2e-3, swap_in_seconds=0.5, **changes)


@pytest.mark.slow
def test_fusion_pays_where_there_is_a_tail_and_is_off_where_there_is_none() -> None:
    controller = ThresholdController("Auto", 1024)
    first = controller.decide([128] * 512, [gpu()] * 16)
    assert first.threshold
    assert first.predicted_speedup > 1.05
    assert "prior lengths" in first.reason
    assert first.threshold == first.prediction.threshold == int(first.fraction * 512)  # type: ignore[operator]
    for _ in range(6):
        controller.observe([500] * 512)
    flat = controller.decide([128] * 512, [gpu()] * 16)
    assert flat.threshold is None
    assert flat.predicted_speedup == 1.0
    assert "5 iterations" in flat.reason
    alone = ThresholdController("Auto", 1024).decide([128] * 64, [gpu()])
    assert alone.threshold is None, "a single instance has nowhere to migrate to"
    assert list(alone.scanned) == [0.0], "thresholds at which nothing migrates are all the same"


@pytest.mark.slow
def test_hysteresis_keeps_a_threshold_that_is_about_as_good() -> None:
    controller = ThresholdController("Auto", 1024)
    rng = Random(3)
    chosen = []
    for _ in range(6):
        decision = controller.decide([128] * 256, [gpu()] * 8)
        chosen.append(decision.fraction)
        assert decision.fused_seconds <= min(decision.scanned.values()) + 0.0101 * decision.serial_seconds
        controller.observe(Lengths.long_tailed(1024).draw(256, rng))
    assert sum(a != b for a, b in pairwise(chosen)) <= 2


def test_pinned_and_off() -> None:
    pinned = ThresholdController(0.2, 1024).decide([8] * 100, [gpu()] * 4)
    assert (pinned.threshold, pinned.fraction) == (20, 0.2)
    assert "pinned" in pinned.reason
    off = ThresholdController("Off", 1024).decide([8] * 100, [gpu()] * 4)
    assert off.threshold is None
    assert off.predicted_speedup == 1.0
    with pytest.raises(ProfileError, match=r"interStageFusion is 1\.5; it must be"):
        ThresholdController(1.5, 1024)


def test_a_restored_controller_goes_on_as_if_nothing_had_happened() -> None:
    one = ThresholdController("Auto", 512)
    one.decide([16] * 64, [gpu()] * 4)
    one.observe(list(range(1, 65)))
    two = ThresholdController("Auto", 512)
    two.restore(one.as_json())
    assert two.decide([16] * 64, [gpu()] * 4) == one.decide([16] * 64, [gpu()] * 4)


def test_discarded_episodes_are_no_measure_of_lengths() -> None:
    seen, told = ThresholdController("Auto", 512), ThresholdController("Auto", 512)
    seen.observe([*range(1, 65), 0, 0])
    seen.observe([0, 0])
    told.observe(list(range(1, 65)))
    assert seen.decide([16] * 64, [gpu()] * 4) == told.decide([16] * 64, [gpu()] * 4)


def test_the_priors_tail_is_about_ten_times_its_median() -> None:
    lengths = Lengths.long_tailed(2048).draw(20_000, Random(0))
    assert min(lengths) >= 1
    assert max(lengths) == 2048
    assert np.quantile(lengths, 0.999) / np.median(lengths) == pytest.approx(10, rel=0.1)


def test_a_server_takes_more_than_costs_nothing_where_the_freed_one_saves_more() -> None:
    """On CPUs each sample makes a step longer, so BS_max is a few samples: no tail would ever gather."""
    slow = StageProfile(((1, 0.006), (32, 0.012)), 2e-4, 1.4e-4)
    assert slow.bs_max < 5
    controller = ThresholdController("Auto", 128)
    for seed in range(5):
        controller.observe(np.minimum(128, np.random.default_rng(seed).geometric(1 / 32, 64)).tolist())
    decision = controller.decide([16] * 64, [slow] * 2)
    assert decision.roomy
    assert decision.threshold
    assert decision.prediction.migrated
    assert decision.fused_seconds < decision.scanned[0.0]
    twin = ThresholdController("Auto", 128)
    twin.restore(controller.as_json())
    assert twin.decide([16] * 64, [slow] * 2) == controller.decide([16] * 64, [slow] * 2)
