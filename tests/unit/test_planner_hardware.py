"""GPUs by product: the data file, look-up, and names that are nearly right."""

from __future__ import annotations

import pytest

from dovetail.manifest.types import Dtype
from dovetail.planner.hardware import HardwareError, UnknownProduct, gpu, parse, products

ENTRY = """
[Some-GPU]
source = "here"
tflops = {float32 = 10, float16 = 100.5}
memory_gib = 16
memory_gbps = 500
nvlink_gbps = 0
pcie_gbps = 16
capability = [7, 5]
"""


def test_the_data_file_is_sound() -> None:
    assert {"NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "Tesla-V100-SXM2-32GB"} < set(products())
    for name, entry in products().items():
        assert entry.product == name
        assert entry.source
        assert not entry.measured
        # Tensor cores are newer than 7.0, bfloat16 than 8.0; matrix units outrun the float32 ones.
        assert entry.bf16 == (entry.capability >= (8, 0)), name
        assert entry.dtype in entry.flops, name
        assert entry.flops[Dtype.FLOAT16] > entry.flops[Dtype.FLOAT32], name
        # Orders of magnitude, so that a slip of a unit does not pass.
        assert 8e9 < entry.memory < 400e9, name
        assert 2e11 < entry.memory_bandwidth < 1e13, name
        assert 5e13 < entry.flops[Dtype.FLOAT16] < 3e15, name
        assert 1e10 <= entry.pcie <= entry.peer <= 1e12, name


def test_figures_are_in_bytes_and_seconds() -> None:
    h100 = gpu("NVIDIA-H100-80GB-HBM3")
    assert (h100.flops[Dtype.BFLOAT16], h100.memory_bandwidth, h100.nvlink) == (989.5e12, 3350e9, 450e9)
    assert gpu("NVIDIA-H100-80GB-HBM3-SHARED") == h100
    assert gpu("Tesla-V100-SXM2-32GB").dtype is Dtype.FLOAT16
    assert gpu("NVIDIA-L4").peer == gpu("NVIDIA-L4").pcie


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("H100", "NVIDIA-H100-80GB-HBM3"),
        ("a100-80gb", "NVIDIA-A100-SXM4-80GB"),
        ("NVIDIA-A100-SXM4-80G", "NVIDIA-A100-SXM4-80GB"),
        ("Tesla-V100-SXM2-32Gb", "Tesla-V100-SXM2-32GB"),
        ("nvidia-l40s", "NVIDIA-L40S"),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "NVIDIA-H100-80GB-HBM3"),
    ],
)
def test_nearest_names_are_offered(asked: str, offered: str) -> None:
    with pytest.raises(UnknownProduct, match=rf"^GPU product {asked} is unknown; did you mean .*{offered}[ ?]"):
        gpu(asked)


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(UnknownProduct, match="known are NVIDIA-A10, "):
        gpu("zzz")


def test_measured_entries_go_first() -> None:
    measured = parse(ENTRY.replace("Some-GPU", "NVIDIA-L4"), measured=True)
    assert gpu("NVIDIA-L4", measured).measured
    assert gpu("NVIDIA-L4", measured).memory == 16 * 2**30
    assert not gpu("NVIDIA-L4").measured


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 16\n", "", r"\[Some-GPU\] in the hardware file misses memory_gib"),
        ("pcie_gbps = 16", "pcie_gbps = 0", r"pcie_gbps is 0; it must be a number above 0"),
        ("pcie_gbps = 16", "pcie_gbps = true", r"pcie_gbps is True"),
        ("memory_gib = 16", "memory_gib = 16\nfans = 2", "has an unknown fans"),
        ("float32 = 10", "float3 = 10", "tflops: 'float3' is not a valid Dtype"),
        ("[7, 5]", "7.5", "capability must be two whole numbers"),
        ("[Some-GPU]", "Some-GPU", "is not TOML"),
    ],
)
def test_bad_files_are_refused_with_the_entry(old: str, new: str, message: str) -> None:
    assert old in ENTRY
    with pytest.raises(HardwareError, match=message):
        parse(ENTRY.replace(old, new))
