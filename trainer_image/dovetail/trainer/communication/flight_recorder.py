"""What torch's flight recorder knows of this process's collectives."""

from __future__ import annotations

import json

from torch._C import _distributed_c10d as c10d

# NCCL's collectives and those of other backends. torch has them as JSON by these names alone: its public tools read
# pickles.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def oldest_wait() -> str:
    """The oldest collective that has not ended, such as `nccl:all_reduce 342`, where 342 counts those of its group.
    Empty if there is none."""
    dumps = [json.loads(getattr(c10d, name)()) for name in _DUMPS if hasattr(c10d, name)]
    open_ones = [entry for dump in dumps for entry in dump.get("entries", []) if not entry["retired"]]
    if not open_ones:
        return ""
    oldest = min(open_ones, key=lambda entry: entry["time_created_ns"])
    number = oldest["p2p_seq_id"] if oldest["is_p2p"] else oldest["collective_seq_id"]
    return f"{oldest['profiling_name']} {number}"
