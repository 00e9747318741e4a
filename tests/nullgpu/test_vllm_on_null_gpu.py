"""vLLM's GPU worker and both of its model runners with Dovetail's plug-ins, on a GPU that does no arithmetic.

vLLM's build for CPUs has all of its Python. Its native operations and its management library are stand-ins; see
programs/vllm_engine.py."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.null_gpu import Run

pytestmark = pytest.mark.slow


@pytest.fixture
def engines(null_gpu: Run) -> dict[str, dict[str, Any]]:
    """What engines did, by name. Triton may compile kernels first, during which nothing is reported."""
    (found,) = null_gpu("vllm", "vllm_engine.runners").good()
    engines: dict[str, dict[str, Any]] = found
    return engines


@pytest.fixture(params=["V1", "V2"])
def engine(request: pytest.FixtureRequest, engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What an engine with the runner did."""
    return engines[request.param] | {"name": request.param}


def test_an_engine_takes_weights_samples_and_moves_a_response(engine: dict[str, Any]) -> None:
    assert engine["platform"] == "NvmlCudaPlatform"
    modules = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}
    assert engine["runner"] == modules[engine["name"]]
    assert engine["sampler"] == {"V1": "counter", "V2": "native"}[engine["name"]]
    assert engine["received"]["tensors"] == 21, "tensors of a version of the weights, which the model's loader took"
    assert engine["lengths"] == [5, 5]
    kept = engine["moved"]["kept"]
    assert kept == 3 * 16 * 2 * 2 * 4 * 64 * 2, "three blocks of two layers' keys and values in bfloat16"
    assert engine["moved"]["brought"] >= kept, "the blocks came back to the device"
    assert engine["moved"]["tokens"] >= 1


@pytest.mark.parametrize("name", ["V1", "V2", "experts"])
def test_new_weights_are_written_where_cuda_graphs_read_them(engines: dict[str, dict[str, Any]], name: str) -> None:
    received = engines[name]["received"]
    assert received["version"] == 3
    assert received["places"] > 10
    assert received["moved"] == []


def test_the_runner_of_gpus_says_which_experts_each_token_got(engines: dict[str, dict[str, Any]]) -> None:
    """Routing replay: vLLM chooses its V2 runner by itself, and collects with it. The experts' numbers are 0 here."""
    found = engines["experts"]
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    # Of each token but the last, which was never computed: layers, experts of a token.
    assert found["shapes"] == [[4 + 5 - 1, 2, 2], [2 + 5 - 1, 2, 2]]
    assert found["dtype"] == "uint8"
