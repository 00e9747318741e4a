"""Sets up torch's CUDA allocator in the processes that Dovetail starts."""

from __future__ import annotations

from collections.abc import MutableMapping

# The newer name comes first.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Let memory segments grow, so that almost nothing is lost to fragmentation. Call it before the process allocates
    on a GPU. A user's own settings stay as they are. Do not call it for vLLM, whose sleep mode does not work with
    expandable segments."""
    if not any(name in environ for name in NAMES):
        environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
