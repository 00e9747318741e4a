"""A rank's part of a model's weights, ready to be sent. No rank gathers the parts of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dovetail.models.build import local_part
from dovetail.models.transfer import Part
from dovetail.protocol.weights.buckets import layer_of
from dovetail.protocol.weights.layout import StageRanks
from dovetail.trainer.communication.groups import peer_errors
from dovetail.trainer.engine import lora
from dovetail.trainer.engine.engine_model import EngineModel
from dovetail.trainer.engine.parallel import is_sharded


def senders(held: EngineModel, most: int) -> StageRanks | None:
    """The layout in which at most `most` of the stage's first dp ranks together hold its tensors, or None if more ranks
    share them."""
    sharded, tp = is_sharded(held.module), held.groups.tp_size
    pipelines = getattr(held.groups.layout, "pipelines", 1)
    shards = held.dp_size // pipelines if sharded else 1
    copies = min(held.dp_size, most // tp) // shards
    return StageRanks(tp, copies * shards, copies) if copies else None


def parts(held: EngineModel, ready: Callable[[list[str]], None] = lambda names: None) -> Iterator[Part]:
    """This rank's part of every tensor of its stage under its Hugging Face name, with adapters merged.

    The tied copy is left out. So is a value head beside a language model, because rollouts do not use it. It is
    collective over dp only if there are adapters.

    `ready(names)` is called before the parameters `names` are read. These are a layer's parameters, or one that is in
    no layer. Raises `PeerLost`."""
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
            mine, place = local_part(parameters[name])
            shape = tuple(parameters[name].shape)
            update = lora.delta(held.module, name, whole)
            if update is not None:
                mine = (mine.float() + update[place]).to(mine.dtype)
            box = tuple((side.start, side.stop) for side in place)
            yield Part(plain, shape, box, mine, held.split.shared.get(name))
