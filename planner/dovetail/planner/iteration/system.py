"""What the software on the GPUs can do, as far as times and memory depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """Ours by default; `make bench-papers` describes each paper's baselines by these.

    `continuous`: a sample that is done leaves the batch and a waiting one joins; else a batch is decoded until its
    longest sample is done. `balanced`: data-parallel ranks get mini-batches of about equal tokens; else the rank with
    the longest samples is waited for. `shared_weights`: tasks of the same model on the same GPUs hold its weights once,
    in one process; else trainer, vLLM and scorer are processes with weights of their own. `hidden_swaps`: weights come
    from host memory while the task before still runs. `max_samples`: most requests of a server at once."""

    continuous: bool = True
    balanced: bool = True
    shared_weights: bool = False
    hidden_swaps: bool = False
    max_samples: int = 256


DOVETAIL = System()
