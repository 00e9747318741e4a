"""vLLM's GPU worker and both of its model runners with Dovetail's plug-ins, on a GPU that does no arithmetic.

vLLM's build for CPUs has all of its Python. Its native operations and its management library are stand-ins; see
programs/vllm_engine.py."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.null_gpu import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=["V1", "V2"])
def engine(request: pytest.FixtureRequest, null_gpu: Run) -> dict[str, Any]:
    """What an engine with the runner did. Triton may compile kernels first, during which nothing is reported."""
    (engines,) = null_gpu("vllm", "vllm_engine.runners", patience=120).good()
    found: dict[str, Any] = engines[request.param]
    return found | {"name": request.param}


def test_an_engine_takes_weights_samples_and_moves_a_response(engine: dict[str, Any]) -> None:
    assert engine["platform"] == "NvmlCudaPlatform"
    modules = {"V1": "vllm.v1.worker.gpu_model_runner", "V2": "vllm.v1.worker.gpu.model_runner"}
    assert engine["runner"] == modules[engine["name"]]
    assert engine["sampler"] == {"V1": "counter", "V2": "native"}[engine["name"]]
    assert engine["received"] == 21, "tensors of a version of the weights, which the model's loader took"
    assert engine["lengths"] == [5, 5]
    kept = engine["moved"]["kept"]
    assert kept == 3 * 16 * 2 * 2 * 4 * 64 * 2, "three blocks of two layers' keys and values in bfloat16"
    assert engine["moved"]["brought"] >= kept, "the blocks came back to the device"
    assert engine["moved"]["tokens"] >= 1
