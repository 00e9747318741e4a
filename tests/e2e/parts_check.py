"""What a trainer rank would send of its models, against what it gathers."""

from __future__ import annotations

import torch

from dovetail.protocol.weights.layout import Tensor
from dovetail.trainer.engine.engine import Engine
from dovetail.trainer.engine.engine_model import parts, senders


def parts_agree(engine: Engine) -> bool:
    """Whether this rank's parts are the bits of the gathered tensors at the places where the layout expects them.

    A collective call."""
    for name, held in engine.models.items():
        whole = {key: value.clone() for key, value in engine.weights(name)}
        layout = senders(held, 16)
        assert layout is not None
        mine = list(parts(held))
        rank = held.groups.dp_rank * layout.tp + held.groups.tp_rank
        if [part.name for part in mine] != list(whole):
            return False
        for part in mine:
            places = layout.boxes(Tensor(part.shape, part.tp_dim, part.tensor.element_size(), part.experts))
            expected = next((box for box, ranks in places.items() if rank in ranks), None)
            at = tuple(slice(*interval) for interval in part.box)
            kept = part.name in held.module.constants  # every rank holds all of it, and sends a part
            if not kept and (expected not in (part.box, None) or (expected is None) != (part.tensor.numel() == 0)):
                return False
            if part.shape != tuple(whole[part.name].shape) or not torch.equal(part.tensor, whole[part.name][at]):
                return False
    return True
