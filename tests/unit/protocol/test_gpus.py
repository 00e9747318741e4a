"""What a process does with the GPU that it finds: dtype, kernels, and one sentence where it cannot use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.gpus import kernel_check as process
from dovetail.gpus.kernel_check import architectures, torch_problem
from dovetail.gpus.kernels import DEFAULT_ARCHITECTURES, has_kernels, read_capability, serves, serving_dtype
from dovetail.gpus.nvidia_driver import BrokenDriver, Device, Driver, NoDriver, ask_driver
from dovetail.manifest.types import Dtype

V100, T4, A100, A10, H100 = (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)
AUTO, BF16, F16, F32 = Dtype.AUTO, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32


def driver(*capabilities: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> Driver:
    return Driver(cuda, tuple(Device(k, f"GPU-{c[0]}{c[1]}", c, 16 << 30) for k, c in enumerate(capabilities)))


@pytest.mark.parametrize(
    ("group", "actor", "capability", "dtype"),
    [
        (AUTO, AUTO, None, F32),
        (AUTO, AUTO, V100, F16),
        (AUTO, AUTO, T4, F16),
        (AUTO, AUTO, A100, BF16),
        (AUTO, BF16, V100, F16),  # the weights arrive in bfloat16, and are converted
        (AUTO, BF16, None, BF16),
        (AUTO, F32, V100, F32),
        (F16, BF16, H100, F16),
        (F32, AUTO, V100, F32),
        (BF16, AUTO, A100, BF16),
    ],
)
def test_the_dtype_of_a_server_or_scorer(
    group: Dtype, actor: Dtype, capability: tuple[int, int] | None, dtype: Dtype
) -> None:
    assert serving_dtype(group, actor, capability) is dtype


def test_bfloat16_that_a_group_asks_for_is_refused_on_an_old_gpu() -> None:
    with pytest.raises(
        ValueError, match=r"^the group's dtype is bfloat16, which a GPU of .* 7\.5 .* set it to float16"
    ):
        serving_dtype(BF16, AUTO, T4)


@pytest.mark.parametrize(
    ("architecture", "runs", "fails"),
    [
        ("sm_80", [A100, A10, (8, 9)], [T4, H100]),
        ("sm_86", [A10, (8, 9)], [A100]),
        ("sm_90a", [H100], [(10, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(12, 0), H100]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0)]),
        ("compute_75", [T4, A100, (12, 1)], [V100]),
        ("gfx90a", [], [H100]),
    ],
)
def test_the_gpus_that_kernels_run_on(
    architecture: str, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    assert all(serves(architecture, capability) for capability in runs)
    assert not any(serves(architecture, capability) for capability in fails)


@given(st.integers(7, 13), st.integers(0, 9))
def test_a_capability_is_written_and_read(major: int, minor: int) -> None:
    assert read_capability(f"{major}.{minor}") == (major, minor)


@pytest.mark.parametrize("text", ["", "7", "sm_70", "7.0.1", "a.b"])
def test_what_is_no_capability_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        read_capability(text)


def test_the_images_torch_has_the_kernels_that_validation_counts_on() -> None:
    """The list is that of requirements/, which this environment is installed from."""
    assert tuple(architectures()) == DEFAULT_ARCHITECTURES
    assert all(has_kernels(DEFAULT_ARCHITECTURES, c) for c in (T4, A100, A10, (8, 9), H100, (10, 0), (12, 0)))
    assert not has_kernels(DEFAULT_ARCHITECTURES, V100)


def test_a_gpu_without_kernels_is_named_with_what_to_build() -> None:
    problem = torch_problem(driver(A100, V100), "2.13.0+cu130", "13.0", DEFAULT_ARCHITECTURES)
    assert problem == (
        "GPU 1 (GPU-70) has compute capability 7.0, and torch 2.13.0+cu130 has kernels for 7.5, 8.0, 8.6, 9.0, 10.0 "
        "and 12.0; build an image with torch for CUDA 12.6 and --build-arg CAPABILITY=7.0 (docs/images.md)"
    )
    assert torch_problem(driver(A100, T4), "2.13.0", "13.0", DEFAULT_ARCHITECTURES) is None
    assert torch_problem(driver(V100), "2.13.0+cpu", None, ()) is None


def test_a_driver_that_is_too_old_for_torch_is_said() -> None:
    problem = torch_problem(driver(A100, cuda=(12, 4)), "2.13.0", "13.0", DEFAULT_ARCHITECTURES)
    assert problem is not None
    assert problem.startswith("the NVIDIA driver serves CUDA 12.4, and torch 2.13.0 is built for CUDA 13.0; update")
    assert torch_problem(driver(A100, cuda=(12, 2)), "2.13.0", "12.6", ["sm_80"]) is None


def test_without_a_driver_a_process_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDriver, match="no NVIDIA driver reaches this process"):
        ask_driver("libcuda-of-nobody.so.1")

    def none() -> Driver:
        raise NoDriver("x")

    monkeypatch.setattr(process, "ask_driver", none)
    assert process.my_capability() is None
    monkeypatch.setattr(process, "ask_driver", lambda: driver())
    assert process.my_capability() is None


def test_a_gpu_that_was_given_and_is_gone_is_no_reason_to_work_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose GPU failed is started again. It would go on with other bits, and a hundred times slower."""
    monkeypatch.setattr(process, "ask_driver", lambda: driver())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for visible in ("0", "GPU-5e1", "MIG-7,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(OSError, match=f"gave this process GPU {visible}, and the driver shows none"):
            process.my_capability()
    for nothing in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert process.my_capability() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert process.my_capability() is None, "a torch without CUDA works on CPUs"


def test_a_driver_that_does_not_start_is_no_reason_to_work_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Driver:
        raise BrokenDriver("the NVIDIA driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)")

    monkeypatch.setattr(process, "ask_driver", broken)
    with pytest.raises(ValueError, match="DRIVER_MISMATCH"):
        process.my_capability()


def test_the_least_capable_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setattr(process, "ask_driver", lambda: driver(H100, T4, A100))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(DEFAULT_ARCHITECTURES))
    assert process.my_capability() == T4
    monkeypatch.setattr(process, "ask_driver", lambda: driver(H100, V100))
    with pytest.raises(ValueError, match=r"^GPU 1 .* 7\.0"):
        process.my_capability()


@pytest.mark.parametrize(("given_", "code", "words"), [("8.0", 0, ""), ("7.0", 1, "not for 7.0"), ("x", 2, "write it")])
def test_a_build_that_lacks_kernels_fails(
    given_: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert process.main([given_]) == code
    assert words in capsys.readouterr().err


def test_both_dockerfiles_check_the_kernels_that_are_asked_for() -> None:
    root = Path(__file__).parents[3]
    for name in ("trainer_image", "rollout_image"):
        assert "dovetail.gpus.kernel_check ${CAPABILITY}" in (root / name / "Dockerfile").read_text()
