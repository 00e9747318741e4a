"""What can go wrong while a command runs, told apart by what must follow.

`PeerLost` (dovetail.trainer.groups): the process groups are useless; drop them and join again."""

from __future__ import annotations

import re

import torch.distributed as dist

from dovetail.manifest.callables import FunctionError
from dovetail.models import ModelError
from dovetail.models.transfer import TransferError
from dovetail.trainer.groups import PeerLost, RankFailed

# Texts of Gloo's and NCCL's errors, which come as plain RuntimeError from inside a backward pass, say.
_TRANSPORT = re.compile(r"gloo/|\bGLOO\b|NCCL|closed by peer|reset by peer|broken pipe|Operation timed out", re.I)


class BadCommand(Exception):
    """The command cannot be executed as it is; nothing was changed. One sentence."""


class Superseded(Exception):
    """The coordinator has moved on to a newer generation: drop the groups and join again."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective or transfer between ranks broke; an error that all ranks agreed on is none."""
    if isinstance(error, PeerLost | dist.DistError):
        return True
    if isinstance(error, FunctionError | RankFailed | TransferError):
        return False
    return isinstance(error, RuntimeError | OSError) and _TRANSPORT.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out (torch reports the host's as a plain RuntimeError)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def sentence(error: BaseException, remedy: str = "") -> str:
    """One line for a CommandResult: the error's first line, with its kind where the text alone would not tell.

    `remedy` follows when memory ran out: which setting lowers the need."""
    if is_out_of_memory(error):
        return f"out of memory{remedy}"
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, BadCommand | FunctionError | RankFailed | TransferError | ModelError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
