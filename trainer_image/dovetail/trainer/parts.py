"""What a rank holds of a model's weights, ready to be sent: no rank gathers what others hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dovetail.api.buckets import layer_of
from dovetail.api.switching.layout import Layout
from dovetail.models.build import local_rows
from dovetail.models.transfer import Part
from dovetail.trainer import lora
from dovetail.trainer.engine_model import EngineModel
from dovetail.trainer.groups import peer_errors


def senders(held: EngineModel, most: int) -> Layout | None:
    """How at most `most` dp ranks of the model's stage, from 0 on, hold its tensors together; None: it is sharded over
    more ranks than that."""
    sharded = any(hasattr(p, "to_local") for p in held.module.parameters())
    pipelines = getattr(held.groups.layout, "pipelines", 1)
    shards = held.dp_size // pipelines if sharded else 1
    copies = min(held.dp_size, most) // shards
    return Layout(dp=copies * shards, sharded=True, copies=copies) if copies else None


def parts(held: EngineModel, ready: Callable[[list[str]], None] = lambda names: None) -> Iterator[Part]:
    """This rank's rows of every tensor of its stage under its Hugging Face name, adapters merged. The tied copy is left
    out, and a value head beside a language model's, for which rollouts have no use. A collective over dp only where
    there are adapters.

    `ready(names)` is called before the parameters `names`, a layer's or one outside of them, are read. Raises
    `PeerLost`."""
    parameters = dict(held.module.named_parameters())
    units: dict[str, list[str]] = {}
    for name in parameters:
        units.setdefault(layer_of(name) or name, []).append(name)
    copy = held.module.tied_copy
    left_out = {copy if copy != held.module.embedding_name else None, held.module.beside_policy}

    def whole(name: str) -> Tensor:
        with peer_errors(f"gathering {name} of {held.name}"):
            parameter: Any = parameters[name].detach()
            return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

    for unit in units.values():
        ready(unit)
        for name in unit:
            plain = lora.plain_name(name)
            if plain is None or name in left_out:
                continue
            mine, rows = local_rows(parameters[name])
            shape = tuple(parameters[name].shape)
            update = lora.delta(held.module, name, whole)
            if update is not None:
                mine = (mine.float() + update[rows]).to(mine.dtype)
            yield Part(plain, shape, ((rows.start, rows.stop), *((0, n) for n in shape[1:])), mine)
