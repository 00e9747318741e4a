"""Keeps an iteration's finished and scored samples as a batch on disk, until a checkpoint covers it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.text.tokenize import ppo_batch
from dovetail.coordinator.store.experts import UNKNOWN, whole
from dovetail.coordinator.store.samples import Key, Sample
from dovetail.protocol.files.durable import write_whole
from dovetail.protocol.wire import Arrays, pack

FloatArray = NDArray[np.float32]


def experience_arrays(
    samples: Sequence[Sample], pad: int, experts: Mapping[Key, Sequence[tuple[int, bytes]]] | None = None
) -> Arrays:
    """The arrays of scored samples, as docs/architecture.md, "Batches", ppo describes them. `groups` are the prompts'
    positions. `experts` has the experts of samples' tokens, if servers reported them (`SampleTable.experts`)."""
    arrays = ppo_batch([s.prompt_tokens for s in samples], [s.tokens for s in samples], pad)
    longest = max(len(s.tokens) for s in samples)

    def per_token(rows: Sequence[FloatArray]) -> FloatArray:
        result = np.zeros((len(rows), longest), np.float32)
        for target, row in zip(result, rows, strict=True):
            target[: len(row)] = row
        return result

    arrays["rollout_logprobs"] = per_token([s.logprobs for s in samples])
    references = [s.ref_logprobs for s in samples if s.ref_logprobs is not None]
    if len(references) == len(samples):  # an earlier release also scored samples whose reference nobody reads
        arrays["ref_logprobs"] = per_token(references)
    values = [s.values for s in samples if s.values is not None]
    if values:
        arrays["values"] = per_token(values)
    arrays["scores"] = np.array([s.reward for s in samples], np.float32)
    arrays["groups"] = np.array([s.key.prompt for s in samples], np.int32)
    arrays["finished"] = np.array([s.finished for s in samples], np.uint8)
    if experts:
        arrays["routed_experts"] = routed_experts(samples, experts, arrays["tokens"].shape[1])
    return arrays


def routed_experts(
    samples: Sequence[Sample], experts: Mapping[Key, Sequence[tuple[int, bytes]]], longest: int
) -> NDArray[np.int16]:
    """The experts as one array (N, longest, layers, experts of a token). It is UNKNOWN where no server reported any."""
    rows = [whole(experts.get(s.key, ()), len(s.prompt_tokens) + len(s.tokens)) for s in samples]
    shape = next(row.shape[1:] for row in rows if row is not None)
    table = np.full((len(samples), longest, *shape), UNKNOWN, np.int16)
    for target, row in zip(table, rows, strict=True):
        if row is not None:
            target[: len(row)] = row
    return table


class ExperienceFiles:
    """The batches `ppo/<iteration>` as files, so that a step can be replayed bit for bit. A file is written completely
    or not at all."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "experience"
        self._known: dict[int, str] = {}
        self._dir.mkdir(parents=True, exist_ok=True)

    def _path(self, iteration: int) -> Path:
        return self._dir / f"{iteration:06d}.safetensors"

    def write(self, iteration: int, arrays: Arrays) -> str:
        """Write the iteration's batch. It is on the disk on return. Returns the content's digest."""
        data = pack(arrays)
        write_whole(self._path(iteration), data)
        self._known[iteration] = digest = hashlib.sha256(data).hexdigest()
        return digest

    def read(self, iteration: int, digest: str | None = None) -> bytes:
        """Read the iteration's batch. Raises KeyError if it was not stored, or was dropped after a checkpoint, and
        ValueError with a sentence if the file does not have this `digest`."""
        try:
            data = self._path(iteration).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"ppo/{iteration}") from None
        if digest is not None and self._known.get(iteration) != digest:
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(
                    f"{self._path(iteration)} is damaged or of another run: its content is not what the run stored; "
                    "put a copy of the file back, or start a new run"
                )
            self._known[iteration] = digest
        return data

    def has(self, iteration: int) -> bool:
        """Whether the iteration is stored."""
        return self._path(iteration).is_file()

    def forget_through(self, iteration: int) -> None:
        """Drop the iterations up to and including this one. Call it when a checkpoint covers them."""
        for path in self._dir.glob("*.safetensors"):
            if path.stem.isdecimal() and int(path.stem) <= iteration:
                path.unlink(missing_ok=True)
