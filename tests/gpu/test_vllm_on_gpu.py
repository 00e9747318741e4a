"""Whole jobs of PPO with a real vLLM on one real GPU, which trainers, scorers and servers share. Skipped where vLLM's
build for GPUs is not installed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dovetail.gpus.nvidia_driver import driver_devices
from dovetail.manifest.types import RLHFJob
from dovetail.rollout.versions import installed
from dovetail.tools.one_line import product_label
from helpers.jobs import Reaper, history, run_job, same_weights, sample_rows, tiny_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif((installed() or ("none",))[0] != "vllm", reason="vLLM's build for GPUs is not installed"),
]
HEADS_OF_64: dict[str, Any] = {
    "architecture": "llama",
    "config": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
}
# vLLM measures what is free when it starts, and other processes on the GPU start as well.
CACHE = ["--kv-cache-memory-bytes", str(1 << 30)]


def on_gpu(groups: list[dict[str, Any]], **spec: Any) -> RLHFJob:
    """The tiny job, with each of `groups` on this machine's GPU."""
    gpu = {"product": product_label(driver_devices()[0].name), "perPod": 1}
    actor = {"source": {"scratch": HEADS_OF_64}}
    return tiny_job(models={"actor": actor}, groups=[{**group, "gpu": gpu} for group in groups], **spec)


def separate(**spec: Any) -> RLHFJob:
    return on_gpu(
        [
            {"name": "trainers", "roles": ["trainer"]},
            {"name": "rollouts", "roles": ["rollout"], "replicas": 2, "vllmArgs": CACHE},
        ],
        **spec,
    )


def as_iteration_2_draws() -> Callable[[dict[str, Any]], list[str]]:
    """The victim of a Reaper: a server, once."""
    left = iter(["rollouts-1"])

    def victims(event: dict[str, Any]) -> list[str]:
        draws = event["event"] == "server.allotted" and event.get("iteration") == 2
        return list(islice(left, 1)) if draws else []

    return victims


@pytest.mark.parametrize("lag", [0, 1])
def test_a_killed_server_changes_no_bit_with_batch_invariant_kernels(tmp_path: Path, lag: int) -> None:
    job = separate(generation={"batchInvariant": True}, ppo={"lag": lag})
    outcome, _ = run_job(job, tmp_path / "alone")
    assert outcome.succeeded, outcome.reason
    reaper = Reaper(tmp_path / "killed", as_iteration_2_draws())
    outcome, told = run_job(job, tmp_path / "killed", reaper)
    assert outcome.succeeded, outcome.reason
    assert any("rollouts-1 died" in line for line in told), told
    assert sample_rows(tmp_path / "killed") == sample_rows(tmp_path / "alone")
    assert same_weights(tmp_path / "alone", tmp_path / "killed") == []


def test_a_server_leaves_the_gpu_to_the_trainers_and_comes_back(tmp_path: Path) -> None:
    job = on_gpu([{"name": "both", "roles": ["trainer", "rollout"], "vllmArgs": CACHE}])
    outcome, _ = run_job(job, tmp_path)
    assert outcome.succeeded, outcome.reason
    steps = history(tmp_path, "ppo")
    assert len(steps) == job.spec.ppo.iterations
    assert all(0 < metrics["mismatch_abs"] < 0.1 for metrics in steps.values()), "bfloat16's rounding, and no more"
