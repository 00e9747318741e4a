"""Inventories: files, Kubernetes nodes, and what is said about bad ones."""

import pytest

from dovetail.gpus.inventory import Inventory, InventoryError, from_nodes, read

A100 = "NVIDIA-A100-SXM4-80GB"


def node(product=A100, gpus="8", ready="True", **spec):
    return {
        "metadata": {"labels": {"nvidia.com/gpu.product": product} if product else {}},
        "spec": spec,
        "status": {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": ready}]},
    }


def test_a_file_names_pools_with_prices_and_links():
    pools = [
        {"product": A100, "nodes": 2, "gpusPerNode": 8, "pricePerGPUHour": 2.5, "networkGbps": 200},
        {"name": "small", "product": "Tesla-T4"},
    ]
    found = read({"pools": pools})
    assert [(p.name, p.gpus, p.price) for p in found.pools] == [("a100-sxm4-80gb", 16, 2.5), ("small", 1, None)]
    assert found["a100-sxm4-80gb"].network == 25e9
    assert found.gpus == 17
    assert not found.measured


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "holds no list `pools`"),
        ({"pools": []}, "the inventory has no pools"),
        ({"pools": ["a100"]}, r"pools\[0\] of the inventory is no mapping"),
        ({"pools": [{"product": A100, "node": 3}]}, r"pools\[0\] of the inventory has an unknown node; known are"),
        ({"pools": [{"nodes": 3}]}, r"pools\[0\].product of the inventory is None"),
        ({"pools": [{"product": "A100-SXM-80G"}]}, r"GPU product A100-SXM-80G is unknown; did you mean NVIDIA-A100-S"),
        ({"pools": [{"product": A100, "nodes": 0}]}, r"pools\[0\].nodes of the inventory is 0; it must be a whole"),
        ({"pools": [{"product": A100, "pricePerGPUHour": -1}]}, r"pricePerGPUHour of the inventory is -1"),
        ({"pools": [{"product": A100}, {"product": A100}]}, "two pools named a100-sxm4-80gb"),
    ],
)
def test_a_bad_file_is_answered_with_one_sentence(document, words):
    with pytest.raises(InventoryError, match=words) as raised:
        read(document)
    assert "\n" not in str(raised.value)


def test_nodes_that_cannot_run_pods_do_not_count():
    nodes = [node(), node(), node(gpus="4"), node(ready="False"), node(unschedulable=True), node(product=None)]
    nodes += [node(product="NVIDIA-A10", gpus="0")]
    found = from_nodes(nodes)
    assert [(p.name, p.nodes, p.per_node) for p in found.pools] == [
        ("a100-sxm4-80gb-x4", 1, 4),
        ("a100-sxm4-80gb-x8", 2, 8),
    ]
    assert read({"kind": "List", "items": nodes}) == found


def test_a_cluster_without_gpus_is_told_so():
    with pytest.raises(InventoryError, match="no node is ready and has nvidia"):
        from_nodes([node(product=None)])
    with pytest.raises(InventoryError, match="no pools"):
        Inventory(())
