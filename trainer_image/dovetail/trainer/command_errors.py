"""The errors of a command. Each kind says what the rank must do next.

After `PeerLost` (dovetail.trainer.communication.groups) the process groups are useless. The rank drops them
and joins again."""

from __future__ import annotations

import re

import torch.distributed as dist

from dovetail.manifest.callables import FunctionError
from dovetail.models import ModelError
from dovetail.models.links.deadline import TransferError
from dovetail.trainer.communication.groups import PeerLost, RankFailed

# These are texts of Gloo's and NCCL's errors. They come as plain RuntimeError, for example from a backward pass.
_TRANSPORT = re.compile(r"gloo/|\bGLOO\b|NCCL|closed by peer|reset by peer|broken pipe|Operation timed out", re.I)


class BadCommand(Exception):
    """The command cannot be executed as it is, and nothing was changed. The message is one sentence."""


class Superseded(Exception):
    """The coordinator has moved on to a newer generation. The rank must drop its groups and join again."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective or transfer between ranks broke. An error that all ranks agreed on does not count."""
    if isinstance(error, PeerLost | dist.DistError):
        return True
    if isinstance(error, FunctionError | RankFailed | TransferError):
        return False
    return isinstance(error, RuntimeError | OSError) and _TRANSPORT.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out. For host memory torch raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def sentence(error: BaseException, remedy: str = "") -> str:
    """One line for a CommandResult. It is the error's first line, with the name of its class if the text needs it.

    `remedy` is added if memory ran out. It says which setting lowers the need for memory."""
    if is_out_of_memory(error):
        return f"out of memory{remedy}"
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, BadCommand | FunctionError | RankFailed | TransferError | ModelError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
