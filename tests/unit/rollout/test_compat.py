"""What Dovetail uses of torch and vLLM without a promise: whether it is still there, and nowhere but in `compat`."""

from __future__ import annotations

import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dovetail.models import compat as models
from dovetail.rollout import compat as rollout
from dovetail.trainer import compat as trainer
from helpers.cluster import wait_for
from helpers.patience import PATIENCE

ROOT = Path(__file__).parents[3]
SOURCES = {
    "dovetail.models": ROOT / "src/dovetail/models",
    "dovetail.trainer": ROOT / "trainer_image/dovetail/trainer",
    "dovetail.rollout": ROOT / "rollout_image/dovetail/rollout",
}
EVERYTHING = [(module, private) for module in (models, trainer, rollout) for private in module.PRIVATE]
# vLLM's interfaces for plug-ins, and what is `vllm` itself.
VLLM_FOR_PLUGINS = (
    "vllm",
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.logger",
    "vllm.v1.sample.logits_processor",
)
UNDERSCORED = re.compile(
    r"\b(torch|dist)(\.\w+)*\._[a-z]\w*|\bfrom torch[\w.]*\._\w+ import|\._is_view\b|tensor\._base\b|\._Options"
)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "private"), EVERYTHING, ids=lambda x: getattr(x, "name", ""))
def test_what_is_private_is_still_there(module, private) -> None:  # type: ignore[no-untyped-def]
    path, _, names = private.name.partition(":")
    try:
        found = importlib.import_module(path)
        for name in names.split("."):
            found = getattr(found, name) if hasattr(found, name) else found.__dict__[name]
    except (ImportError, KeyError) as error:
        if "NCCL" in names and not hasattr(dist, "ProcessGroupNCCL"):
            pytest.skip("torch is built without NCCL here")
        if names in ("DeviceMesh._pg_registry", "Worker._weight_update_active"):
            return  # set on objects: a test below sees the one, tests/e2e/test_rollout_server.py the other
        what = f"{private.name} (seen in {private.seen}) is gone: {error!r}"
        pytest.fail(f"{what}. Mend {module.__name__}. Why it is used: {private.reason}.")


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_private_parts_are_used_in_compat_alone(package: str) -> None:
    wrong = []
    for path in sorted(SOURCES[package].rglob("*.py")):
        if path.name == "compat.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            imported = re.match(r"\s*(?:from|import) (vllm[\w.]*)", line)
            deep = imported is not None and imported[1] not in VLLM_FOR_PLUGINS
            if deep or UNDERSCORED.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    # A subclass is written where its base class can be imported.
    allowed = [line for line in wrong if line.endswith("from vllm.v1.worker.cpu_worker import CPUWorker")]
    assert [line for line in wrong if line not in allowed] == []


def test_views_are_told_from_what_they_are_views_of() -> None:
    whole = torch.zeros(2, 3)
    assert (trainer.is_view(whole), trainer.is_view(whole.t())) == (False, True)
    assert trainer.viewed(whole.t()) is whole
    assert trainer.viewed(whole) is whole


@pytest.mark.slow
def test_a_parameter_of_two_names_is_loaded_under_either() -> None:
    model = torch.nn.Module()
    model.router, model.experts = torch.nn.Linear(2, 2, bias=False), torch.nn.Module()
    model.experts.gate = model.router
    assert rollout.loaded_parameters(model) == [{"router.weight", "experts.gate.weight"}]


def test_the_collective_that_a_rank_waits_in() -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=PATIENCE)
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout), range(2)))
    before = trainer.oldest_wait()  # of another test in this process, if any
    waits = ranks[0].allreduce(torch.ones(2))
    assert trainer.oldest_wait() == (before or "gloo:all_reduce 1")
    ranks[1].allreduce(torch.ones(2)).wait()
    waits.wait()
    # Gloo's own thread says that it is over, after the wait.
    wait_for("the end", lambda: trainer.oldest_wait() == before, PATIENCE)


def test_many_tensors_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert trainer.norms(tensors).tolist() == [5.0, 2.0]
    trainer.multiply(tensors, 0.5)
    assert [t.tolist() for t in tensors] == [[1.5, 2.0], [1.0]]
    trainer.copy_into(tensors, [torch.zeros(2), torch.ones(1)])
    assert [t.tolist() for t in tensors] == [[0.0, 0.0], [1.0]]


def test_groups_beside_the_default_one_and_shards_of_a_mesh() -> None:
    store = dist.HashStore()
    group = models.gloo_group(store, 0, 1, "127.0.0.1", timedelta(seconds=30))
    assert (group.rank(), group.size()) == (0, 1)
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        assert models.local_box(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])) == ((4, 2), (0, 0))
        trainer.forget_groups(mesh)
        assert not getattr(mesh, "_pg_registry", {})
    finally:
        dist.destroy_process_group()
