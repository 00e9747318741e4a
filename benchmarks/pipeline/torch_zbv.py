"""torch's own ZB-V (`torch.distributed.pipelining`), one model after the other: what two models get from torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def zb_v(
    make: Callable[[int], nn.Module],
    rank: int,
    world: int,
    tokens: torch.Tensor,
    hidden: torch.Size,
    micro_batches: int,
    loss: Loss,
) -> ScheduleZBVZeroBubble:
    """One model's schedule on this rank. `make(stage)`: the module of one of 2 * world stages. `tokens`: one
    micro-batch; `hidden`: the shape that crosses a stage boundary. `loss`: of the last stage's output and the
    micro-batch's targets."""
    stages = []
    for index in (rank, 2 * world - 1 - rank):
        module = make(index)
        inputs = torch.zeros_like(tokens) if index == 0 else torch.zeros(hidden, requires_grad=True)
        outputs = module(inputs).detach().requires_grad_(True)  # what needs a gradient is received
        stages.append(
            PipelineStage(module, index, 2 * world, torch.device("cpu"), input_args=inputs, output_args=outputs)
        )
    return ScheduleZBVZeroBubble(stages, micro_batches, loss_fn=loss, scale_grads=False)


def step(schedule: ScheduleZBVZeroBubble, rank: int, tokens: torch.Tensor) -> None:
    """One mini-batch: `tokens` of all micro-batches, which are the targets too. Rank 0 has the first and the last
    stage."""
    given = (tokens,) if rank == 0 else ()
    schedule.step(*given, target=tokens if rank == 0 else None, return_outputs=False)
