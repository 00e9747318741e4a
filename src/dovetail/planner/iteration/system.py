"""What the software on the GPUs can do, as far as times and memory depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.planner.hashing import hashed_once


@hashed_once
@dataclass(frozen=True)
class System:
    """Ours by default; `make bench-papers` describes each paper's baselines by these.

    `continuous`: a sample that is done leaves the batch and a waiting one joins; else all of a server's samples are
    decoded at once, until the longest is done. `balanced`: data-parallel ranks get mini-batches of about equal tokens;
    else the rank with the longest samples is waited for. `shared_weights`: tasks of one model on the same GPUs hold its
    weights once, in one process that frees the cache after generation; else trainer, vLLM and scorer are processes with
    weights of their own. `host_step`: a training that offloads keeps masters and gradients on the host too, and steps
    there, at the pace of PCIe; else only the moments, which come back for the step. `hidden_swaps`: weights come from
    host memory while the task before still runs. `gradient_bytes`: of a gradient that crosses the network.
    `max_samples`: most requests of a server at once."""

    continuous: bool = True
    balanced: bool = True
    shared_weights: bool = False
    host_step: bool = False
    hidden_swaps: bool = False
    gradient_bytes: int = 4
    max_samples: int = 256


DOVETAIL = System()
