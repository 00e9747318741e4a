"""Each process that uses GPUs looks at them before anything else. Where it cannot use one it ends with one sentence and
the exit code after which nothing is started again; a pod's message and the job's condition quote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.gpus.gpu_failure import GPUFailed, context_is_lost, names_cuda
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.plan import Plan, TrainerRank
from dovetail.protocol.process.endings import BAD_CONFIGURATION
from dovetail.protocol.process.env import ProcessEnv
from dovetail.rollout.scoring import scorer
from dovetail.rollout.serving import vllm_server
from dovetail.trainer import main as trainer

SENTENCE = "GPU 0 (Tesla V100) has compute capability 7.0, and torch 2.13.0 has kernels for 7.5; build an image"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process of a group with V100s. Nobody answers at the coordinator's address."""
    groups = [{"name": "g", "roles": ["trainer", "rollout"], "gpu": {"product": "Tesla-V100-SXM2-32GB", "perPod": 1}}]
    job = {
        "apiVersion": "dovetail.dev/v1beta1",
        "kind": "RLHFJob",
        "metadata": {"name": "j"},
        "spec": {"models": {"actor": {"source": {"scratch": {}}}}, "groups": groups},
    }
    (tmp_path / "job.json").write_text(RLHFJob.model_validate(job).model_dump_json(by_alias=True))
    plan = Plan(world_size=1, parallelism={}, batching=[], tasks=[], trainers=[], rollouts=[])
    plan.trainers.append(TrainerRank(name="trainer-0", rank=0, group="g"))
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    env = ProcessEnv("j", "trainer-0", tmp_path, "http://127.0.0.1:9", "x", "127.0.0.1", 0, 0, "g", 0, 1)
    for key, value in env.write().items():
        monkeypatch.setenv(key, value)


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("module", [trainer, vllm_server, scorer], ids=["trainer", "server", "scorer"])
def test_a_gpu_that_torch_has_no_kernels_for(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise ValueError(SENTENCE)

    monkeypatch.setattr(module, "my_capability", refuse)
    assert module.main([]) == BAD_CONFIGURATION
    said = capsys.readouterr()
    last = (said.out + said.err).strip().splitlines()[-1]
    assert SENTENCE in last


@pytest.mark.usefixtures("started")
def test_a_rank_whose_gpu_failed_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise GPUFailed("step/7: the GPU failed: AcceleratorError: CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(trainer, "serve", fail)
    assert trainer.main([]) == 1, "and not the code of a wrong configuration"
    said = capsys.readouterr()
    assert "uncorrectable ECC error" in (said.out + said.err).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),  # of compiled layers
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (RuntimeError("CUDA error: out of memory"), False),  # a smaller micro-batch mends that
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_what_may_be_a_failed_gpu(error: Exception, named: bool) -> None:
    assert names_cuda(error) == named
    assert not context_is_lost(), "on a machine without one"


@pytest.mark.usefixtures("started")
def test_a_server_on_a_v100_serves_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "actor-config"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    seen: list[list[str]] = []
    monkeypatch.setattr(vllm_server, "my_capability", lambda: (7, 0))
    monkeypatch.setattr(vllm_server, "environment", lambda on_cpu, given, invariant: {})  # it would stay after the test
    monkeypatch.setattr(vllm_server, "kv_setup", lambda *_: None)
    monkeypatch.setattr(vllm_server, "serve", lambda arguments, *_: seen.append(arguments) or 0)
    assert vllm_server.main([]) == 0, capsys.readouterr().err
    assert seen[0][seen[0].index("--dtype") + 1] == "float16"


@pytest.mark.usefixtures("started")
def test_a_vllm_that_the_plug_ins_do_not_work_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models" / "actor-config"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_server, "my_capability", lambda: (8, 0))
    monkeypatch.setattr(vllm_server, "installed", lambda: ("vllm", "0.9.2"))
    assert vllm_server.main([]) == BAD_CONFIGURATION
    assert "vLLM 0.9.2 is installed, and Dovetail's plug-ins work with vLLM >=" in capsys.readouterr().err


@pytest.mark.usefixtures("started")
def test_a_scorer_on_a_v100_computes_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def made(devices: list[str], dtype: object, *_: object) -> None:
        seen.append(f"{devices[0]} {dtype}")
        raise ValueError("far enough")

    monkeypatch.setattr(scorer, "my_capability", lambda: (7, 0))
    monkeypatch.setattr(scorer, "ModelScorer", made)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(scorer, "CudaCopies", lambda device: None)
    assert scorer.main([]) == 2
    assert seen == ["cuda:0 torch.float16"]
