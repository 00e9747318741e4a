"""Groups that are formed again in one process, after a peer was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dovetail.manifest.types import Parallelism
from dovetail.trainer.communication.groups import Groups
from helpers.patience import PATIENCE


def test_each_model_is_gathered_over_its_own_groups_of_this_generation(tmp_path: Path) -> None:
    """torch keeps what it found for tensors of equal shapes. A rank that came later would gather over other groups."""
    for generation, models in enumerate((("actor", "critic"), ("critic", "actor"))):
        meeting = str(tmp_path / str(generation))
        layouts = {name: Parallelism() for name in models}
        groups = Groups.form("127.0.0.1", 0, 0, 1, layouts, PATIENCE, meeting=meeting)
        try:
            for name in models:
                mesh = groups.of(name).dp_mesh
                with torch.device("meta"):
                    layer = nn.Linear(4, 1, bias=False)
                fully_shard(layer, mesh=mesh)
                layer.to_empty(device="cpu")
                weight: Any = layer.weight
                assert weight.device_mesh.get_group() is mesh.get_group()
        finally:
            groups.close()
