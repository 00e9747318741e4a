"""An iteration in closed form: monotone where it must be, by hand where that is short, and sentences for what fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.fusion.lengths import Lengths
from dovetail.gpus.gpu_products import gpu
from dovetail.gpus.inventory import Inventory, Pool
from dovetail.manifest.model_shape import ModelShape
from dovetail.manifest.types import LoRA
from dovetail.planner.candidate import Candidate, Placement, Schedule, Share
from dovetail.planner.seconds import decode_step, shared_prompt
from dovetail.planner.workload import Workload
from dovetail.protocol.budgets import SCORER_TOKENS
from dovetail.rollout.scoring.packed_samples import SamplesToScore, packs
from helpers.estimates import estimate, simulate

H100, A100, V100 = gpu("NVIDIA-H100-80GB-HBM3"), gpu("NVIDIA-A100-SXM4-80GB"), gpu("Tesla-V100-SXM2-32GB")
SMALL = ModelShape("llama", 24, 2048, 5504, 16, 16, 128, 32000)
LARGE = ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000)
MIGRATIONS = st.sampled_from([None, 0.1, 0.3])
SCHEDULES = st.sampled_from(["Serial", "TimeSharing", "Fused"])


def inventory(nodes: int = 4, network: float = 25e9, card: str = "NVIDIA-H100-80GB-HBM3") -> Inventory:
    return Inventory((Pool("pool", gpu(card), nodes, 8, network),))


def workload(batch: int = 128, tokens: int = 512) -> Workload:
    response = Lengths.long_tailed(tokens)
    return Workload(SMALL, SMALL, SMALL, SMALL, batch, min(batch, 64), 1, Lengths.fixed(128), response)


def flattened(pp: int = 1, dp: int = 8, micro: int = 1, schedule: Schedule = "Serial", migration: float | None = None):  # type: ignore[no-untyped-def]
    """All on pp x dp GPUs."""
    trained = Share("pool", pp=pp, dp=dp, micro_batch=micro, fsdp=2)
    scored = (Share("pool", dp=pp * dp, micro_batch=4, offload=True),)
    return Candidate(
        Placement.FLATTENING,
        (Share("pool", dp=pp * dp, offload=True),),
        (trained,),
        (trained,),
        scored,
        scored,
        scored,
        schedule=schedule,
        migration=migration,
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), SCHEDULES, MIGRATIONS)
def test_more_work_takes_longer(pp: int, dp: int, micro: int, schedule: Schedule, migration: float | None) -> None:
    candidate, there = flattened(pp, dp, micro, schedule, migration), inventory()
    once = estimate(candidate, workload(), there)
    assert set(once.phases) == {"generation", "inference", "training", "transfer", "swap"}
    assert min(once.phases.values()) >= 0
    assert once.seconds == pytest.approx(sum(once.phases.values()))
    # A whole number of mini-batches, so that these are as full.
    assert estimate(candidate, workload(batch=256), there).seconds > once.seconds
    assert estimate(candidate, workload(tokens=1024), there).seconds > once.seconds
    larger = replace(workload(), actor=LARGE, reference=LARGE)
    assert estimate(candidate, larger, there).seconds > once.seconds
    assert estimate(candidate, replace(workload(), epochs=2), there).phases["training"] > once.phases["training"]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), SCHEDULES, MIGRATIONS)
def test_better_hardware_takes_no_longer(pp: int, dp: int, schedule: Schedule, migration: float | None) -> None:
    candidate, work = flattened(pp, dp, 1, schedule, migration), workload()
    once = estimate(candidate, work, inventory())
    assert estimate(candidate, work, inventory(card="NVIDIA-A100-SXM4-80GB")).seconds > once.seconds
    assert estimate(candidate, work, inventory(network=5e9)).seconds >= once.seconds
    wider = estimate(flattened(pp, 2 * dp, 1, schedule, migration), work, inventory())
    assert wider.phases["generation"] <= once.phases["generation"] * 1.001
    # A pass over weights that too few samples wait for takes as long on more GPUs.
    assert wider.phases["training"] <= once.phases["training"] * 1.05


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_memory_grows_with_work_and_shrinks_with_sharing(pp: int, dp: int, recompute: bool, offload: bool) -> None:
    def peak(fsdp: int = 2, micro: int = 1, work: Workload | None = None, dp: int = dp) -> float:
        work = work or workload()
        base = flattened(pp, dp, micro)
        trained = (replace(base.actor_training[0], fsdp=fsdp, recompute=recompute, offload=offload),)
        # Generation elsewhere: its cache takes whatever is there.
        apart = replace(base, actor_training=trained, critic_training=trained, generation=(Share("pool", 64),))
        return max(m.device_bytes for m in estimate(apart, work, inventory(9)).memory if 64 not in m.range)

    assert peak(micro=2) >= peak()
    assert peak(fsdp=3) <= peak() * 1.001
    assert peak(work=workload(tokens=2048)) >= peak()
    assert peak(work=replace(workload(), actor=LARGE, reference=LARGE)) > peak()
    assert peak(work=replace(workload(), actor_lora=LoRA(rank=8), critic_lora=LoRA(rank=8))) < 1.01 * peak()
    if dp < 8:
        assert peak(dp=2 * dp) <= peak() * 1.001


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), MIGRATIONS)
def test_better_schedules_take_no_longer(pp: int, dp: int, migration: float | None) -> None:
    work, there = workload(), inventory()
    serial, sharing, fused = (
        estimate(flattened(pp, dp, 1, schedule, migration), work, there).phases["training"]
        for schedule in ("Serial", "TimeSharing", "Fused")  # type: ignore[arg-type]
    )
    assert fused < sharing < serial
    alone = estimate(replace(flattened(pp, dp), critic_training=()), work, there).phases["training"]
    assert alone < fused


def test_fusion_hides_inference_and_no_more() -> None:
    work, there = workload(batch=512, tokens=2048), inventory()
    waits = estimate(flattened(dp=32), work, there).phases
    fused = estimate(flattened(dp=32, migration=0.1), work, there).phases
    assert fused["inference"] < waits["inference"]
    assert fused["generation"] < 1.1 * waits["generation"]
    apart = replace(flattened(dp=16), reference=(Share("pool", 16, dp=8, micro_batch=4),), reward=(), critic=())
    beside = estimate(replace(apart, migration=0.1), work, there).phases["inference"]
    assert beside < 0.3 * estimate(apart, work, there).phases["inference"]


def test_generation_of_one_sample_by_hand() -> None:
    work = replace(workload(1), response=Lengths.fixed(100), prompt=Lengths.fixed(1))
    seconds = estimate(flattened(dp=1), work, inventory()).phases["generation"]
    assert seconds == pytest.approx(99 * decode_step(SMALL, 1, 51, H100), rel=0.02)


def test_separated_models_train_at_once() -> None:
    one, two = Share("pool", dp=8, fsdp=2), Share("pool", 8, dp=8, fsdp=2)
    after = estimate(replace(flattened(), actor_training=(one,), critic_training=(one,)), workload(), inventory())
    apart = estimate(replace(flattened(), actor_training=(one,), critic_training=(two,)), workload(), inventory())
    # The critic has no logits.
    assert after.phases["training"] / 2 < apart.phases["training"] < 0.53 * after.phases["training"]


def test_what_does_not_fit_is_said_with_its_parts() -> None:
    huge = ModelShape("llama", 80, 8192, 22016, 64, 64, 128, 32000)
    work = replace(workload(), actor=huge, reference=huge, reward=huge, critic=huge)
    found = estimate(flattened(), work, inventory())
    assert not found.fits
    assert found.problem is not None
    assert found.problem.startswith("pool[0:8] needs ")
    assert "79.6 GiB there (most: actor_training:" in found.problem
    # The keys and values of one sample are too many.
    card = replace(H100, memory=20 * 2**30)
    long = replace(workload(), actor=LARGE, response=Lengths.fixed(60_000))
    servers = Candidate(Placement.SEPARATION, (Share("pool"),), ())
    room = estimate(servers, long, Inventory((Pool("pool", card, 1, 8),)))
    assert room.problem is not None
    assert "generation: KV cache" in room.problem


def test_unlike_gpus_share_a_task_by_speed() -> None:
    there = Inventory((Pool("a", A100, 1, 8), Pool("v", V100, 1, 8)))
    alone = Candidate(Placement.SEPARATION, (Share("a", dp=4),), (Share("a", 4, dp=4, fsdp=2),))
    both = replace(alone, generation=(Share("a", dp=4), Share("v", dp=8)))
    # With a long tail the slower ones would be waited for.
    work = replace(workload(batch=2048), critic=None, reward=None, response=Lengths.fixed(256))
    first, second = (estimate(c, work, there).phases["generation"] for c in (alone, both))
    assert second < first
    scored = replace(alone, reference=(Share("a", dp=4, micro_batch=4),))
    shared = replace(scored, reference=(*scored.reference, Share("v", dp=8, micro_batch=4)))
    assert estimate(shared, work, there).phases["inference"] < estimate(scored, work, there).phases["inference"]


def test_old_log_probabilities_cost_a_pass_where_they_are_not_folded() -> None:
    folded, work = flattened(), workload()
    passed = estimate(replace(folded, folded=False), work, inventory())
    assert passed.phases["inference"] > 1.2 * estimate(folded, work, inventory()).phases["inference"]


@pytest.mark.parametrize(
    ("per_prompt", "prompt", "response"), [(1, 256, 64), (4, 512, 128), (16, 1024, 600), (8, 9000, 50)]
)
def test_scorers_compute_a_prompt_once_for_the_samples_in_a_pass(per_prompt: int, prompt: int, response: int) -> None:
    job = replace(workload(), prompt=Lengths.fixed(prompt), response=Lengths.fixed(response), per_prompt=per_prompt)
    tokens = np.zeros((64, prompt + response), np.int64)
    tokens[:, 0] = np.arange(64) // per_prompt
    samples = SamplesToScore(tokens, np.full(64, prompt), np.full(64, response))
    computed = sum(len(pack.tokens) for pack in packs(samples, SCORER_TOKENS, 10**9))
    expected = 64 * (response + prompt * shared_prompt(job, 1))
    # Neighbouring prompts fill the rest of a pass, so that a group may need one more or fewer.
    assert computed == pytest.approx(expected, rel=0.15)


def test_shared_prompts_shorten_inference_by_scorers_only() -> None:
    there, plan = inventory(), flattened()
    alone, shared = (
        replace(workload(), prompt=Lengths.fixed(1024), response=Lengths.fixed(128), per_prompt=n) for n in (1, 8)
    )
    seconds = [estimate(plan, job, there).phases for job in (alone, shared)]
    assert seconds[1]["inference"] < 0.35 * seconds[0]["inference"]
    assert {**seconds[1], "inference": 0} == {**seconds[0], "inference": 0}
    lengths = [1024] * 128, [128] * 128
    played = [simulate(plan, job, there, *lengths).phases["inference"] for job in (alone, shared)]
    assert played == pytest.approx([phases["inference"] for phases in seconds], rel=0.03)
    unfolded = replace(plan, folded=False)
    more = [estimate(unfolded, job, there).phases["inference"] for job in (alone, shared)]
    assert more[1] - seconds[1]["inference"] == pytest.approx(more[0] - seconds[0]["inference"])
