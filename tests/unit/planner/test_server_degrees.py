"""Pipeline stages and tensor parallel ranks of a vLLM server, and what follows from them; no vLLM is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.manifest.types import Group, RLHFJob
from dovetail.protocol.plan import Plan, Rollout
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.sampling import SERVED_TEMPERATURE
from dovetail.rollout.kv.kv_config import KVSetup
from dovetail.rollout.serving import vllm_server as server

CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
EIGHT = {"gpu": {"product": "A", "perPod": 8}}


def job(**group: Any) -> RLHFJob:
    groups = [{"name": "g", "roles": ["rollout"], **group}, {"name": "t", "roles": ["trainer"]}]
    spec = {"models": {"actor": {"source": {"scratch": {}}}}, "data": {"maxPromptTokens": 100}, "groups": groups}
    made = {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "t"}, "spec": spec}
    return RLHFJob.model_validate(made)


def group(**fields: Any) -> Group:
    return job(**fields).spec.groups[0]


def value(args: list[str], flag: str) -> str:
    """The last one: vLLM takes the last of a repeated flag."""
    return args[len(args) - args[::-1].index(flag)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], (2, 4)),
        (["--port", "2", "--pipeline-parallel-size", "4"], (4, 2)),
        (["-pp", "4", "--pipeline_parallel_size=1"], (1, 8)),
        (["--tensor-parallel", "2", "--seed", "-3"], (2, 2)),  # vLLM takes what is unambiguous, too
        (["-tp=2", "-pp=8", "--hf-overrides", '{"-pp": "--tensor-parallel-size=5"}'], (8, 2)),
        (["-pp", "0"], (1, 8)),  # vLLM will say what it thinks of that
    ],
)
def test_the_degrees_are_those_that_vllm_reads(given: list[str], expected: tuple[int, int]) -> None:
    assert server.degrees(given, group(**EIGHT), False, 2) == expected


def test_without_gpus_a_server_has_the_ranks_that_its_group_asks_for() -> None:
    assert server.degrees([], group(**EIGHT), True, 2) == (2, 1)
    assert server.degrees(["-tp", "2"], group(), True, 1) == (1, 2)


@pytest.mark.parametrize("given", [["--tensor-parallel-size"], ["-pp", "two"]])
def test_degrees_that_are_no_numbers_are_refused_in_one_sentence(given: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^vLLM's arguments of group g: argument -(tp|pp)/--\S+: \S[^\n]+$"):
        server.degrees(given, group(), True, 1)


def started(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, made: RLHFJob, *argv: str
) -> tuple[list[str], KVSetup | None]:
    """vLLM's arguments and the KV setup of a server that a machine without a GPU starts for a plan with two stages."""
    (run_dir / "models" / "actor-config").mkdir(parents=True)
    (run_dir / "models" / "actor-config" / "config.json").write_text(json.dumps(CONFIG))
    (run_dir / "job.json").write_text(made.model_dump_json(by_alias=True))
    plan = Plan(world_size=1, parallelism={}, batching=[], tasks=[], trainers=[], rollouts=[])
    plan.rollouts.append(Rollout(name="r", group="g", pp=2))
    (run_dir / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    own = ProcessEnv("t", "r", run_dir, "http://127.0.0.1:9", "x", "127.0.0.1", 1, 0, "g", 0, 1)
    for key, text in own.write().items():
        monkeypatch.setenv(key, text)
    monkeypatch.setattr(server, "environment", lambda on_cpu, given, invariant: {})  # it would stay after the test
    monkeypatch.setenv(SERVED_TEMPERATURE, "1.0")  # this too
    monkeypatch.setattr(server, "my_capability", lambda: None)
    seen: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda arguments, env, on_cpu, kv, experts: seen.append((arguments, kv)) or 0)
    assert server.main(list(argv)) == 0
    arguments, kv = seen.pop()
    for reserved in kv.reserved if kv is not None else ():
        reserved.close()
    return arguments, kv


def test_a_gpu_groups_stages_are_processes_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, kv = started(monkeypatch, tmp_path, job(**EIGHT))
    assert value(arguments, "--pipeline-parallel-size") == "2"
    assert value(arguments, "--worker-cls") == server.STAGE_WORKER
    assert "--tensor-parallel-size" not in arguments
    assert kv is None
    assert "--kv-transfer-config" not in arguments


def test_stages_asked_for_on_the_command_line_are_no_less_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, kv = started(monkeypatch, tmp_path, job(), "-pp", "3")
    assert value(arguments, "--worker-cls") == server.STAGE_WORKER
    assert kv is None


def test_every_tensor_parallel_rank_has_a_port_for_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments, kv = started(monkeypatch, tmp_path, job(vllmArgs=["--tensor-parallel-size", "2"]))
    assert "--worker-cls" not in arguments
    assert kv is not None
    extra = json.loads(value(arguments, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["ports"] == kv.ability.ports
    assert len(set(kv.ability.ports)) == 2
    assert extra["layout"] == "float32 x 2"


def test_a_stage_has_the_cache_of_its_own_layers(tmp_path: Path) -> None:
    env, made = ProcessEnv("t", "r", tmp_path, "http://127.0.0.1:9", "x", "127.0.0.1", 1, 0, "g", 0, 1), job(**EIGHT)
    caches = []
    for stages in (1, 2, 3):
        arguments = server.vllm_arguments(env, made, made.spec.groups[0], CONFIG, True, "float32", stages)
        caches.append(int(value(arguments, "--kv-cache-memory-bytes")))
    # Of 3 layers in two stages the larger one's: every stage has as many blocks.
    assert 3 * caches[1] == 2 * caches[0] == 6 * caches[2]
    unlimited = 10**9
    assert 4 * server.kv_cache_bytes(CONFIG, 160, unlimited, 4) == pytest.approx(
        server.kv_cache_bytes(CONFIG, 160, unlimited), abs=4
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_stage_that_is_not_the_first_has_room_for_what_it_receives(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory

    from dovetail.rollout import compat
    from dovetail.rollout.serving import cpu_workers

    assert f"{cpu_workers.__name__}.{cpu_workers.StageWorker.__name__}" == server.STAGE_WORKER
    runner = SimpleNamespace(intermediate_tensors=None, max_num_tokens=7, model=None)

    def load_model(self: Any, *, load_dummy_weights: bool) -> None:
        make = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 5)
        runner.model = SimpleNamespace(make_empty_intermediate_tensors=make)

    monkeypatch.setattr(cpu_workers.CPUWorker, "load_model", load_model)
    monkeypatch.setattr(compat, "is_first_stage", lambda: first)
    worker = object.__new__(cpu_workers.StageWorker)
    worker.model_runner, worker.device = runner, torch.device("cpu")
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    worker.load_model()
    if first:
        assert runner.intermediate_tensors is None
        return
    rooms = runner.intermediate_tensors.tensors
    assert {(name, room.shape, room.dtype) for name, room in rooms.items()} == {
        (name, (7, 5), torch.bfloat16) for name in ("hidden_states", "residual")
    }
