"""GPUs by product: the data file, look-up, and names that are nearly right."""

from __future__ import annotations

import pytest

from dovetail.cli.common.plan_inputs import hardware
from dovetail.gpus.gpu_products import HardwareError, UnknownProduct, estimate, gpu, parse, products, read
from dovetail.manifest.types import Dtype
from dovetail.protocol.errors import UsageError

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


@pytest.mark.parametrize("name", ["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb.me"])
def test_a_mig_slice_is_a_part_of_its_gpu(name):
    whole, part = gpu("NVIDIA-A100-SXM4-80GB"), gpu(name)
    sevenths = int(name.partition("MIG-")[2][0])
    assert part.flops[Dtype.BFLOAT16] == pytest.approx(whole.flops[Dtype.BFLOAT16] * sevenths / 7)
    assert part.memory in (10**10, 4 * 10**10)
    assert part.memory_bandwidth / whole.memory_bandwidth == pytest.approx(part.memory / whole.memory)
    assert (part.nvlink, part.capability, part.product) == (0, whole.capability, name)


def test_an_unknown_gpu_is_estimated_from_the_labels_of_its_nodes():
    labels = {
        "nvidia.com/gpu.memory": "98304",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
    }
    found = estimate("NVIDIA-H99", labels)
    assert (found.memory, found.capability, found.estimated) == (98304 << 20, (9, 0), True)
    assert found.flops[Dtype.BFLOAT16] > 1e14
    assert "the labels of its nodes and NVIDIA-H" in found.source
    bare = estimate("ACME-X-48GB")
    assert bare.memory == 48 * 10**9
    assert "estimated from its name" in bare.source


def test_an_administrators_gpu_may_have_a_resource_of_its_own():
    figures = {"source": "x", "tflops": {"bfloat16": 39}, "memory_gib": 9.5, "memory_gbps": 240, "nvlink_gbps": 0}
    more = {"pcie_gbps": 32, "capability": [8, 0], "resource": "nvidia.com/mig-1g.10gb", "node_product": "NVIDIA-A100"}
    (found,) = read({"slice": figures | more}).values()
    assert (found.resource, found.node_product) == ("nvidia.com/mig-1g.10gb", "NVIDIA-A100")
    with pytest.raises(HardwareError, match="has an unknown tflop"):
        read({"slice": figures | more | {"tflop": 1}})


def test_a_laptop_plans_with_the_charts_catalogue(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text(
        "ACME-X1: {tflops: {bfloat16: 300}, memory_gib: 40, memory_gbps: 1500, nvlink_gbps: 0, pcie_gbps: 32, "
        "capability: [8, 0]}"
    )
    found = hardware(path)["ACME-X1"]
    assert (found.memory, found.measured, found.resource) == (40 * 2**30, False, "nvidia.com/gpu")
    path.write_text("ACME-X1: 40")
    with pytest.raises(UsageError, match="holds no tables by product"):
        hardware(path)
