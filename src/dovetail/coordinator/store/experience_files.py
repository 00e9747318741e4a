"""Keeps an iteration's finished and scored samples as a batch on disk, until a checkpoint covers it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.store.episodes import StoredEpisode
from dovetail.coordinator.store.experts import UNKNOWN, whole
from dovetail.coordinator.store.samples import Key, Sample
from dovetail.protocol.files.durable import write_pieces
from dovetail.protocol.wire import Arrays, SampleArrays, pieces


def experience_arrays(
    samples: Sequence[Sample], pad: int, experts: Mapping[Key, Sequence[tuple[int, bytes]]] | None = None
) -> SampleArrays:
    """The arrays of scored samples, as docs/architecture.md, "Batches", ppo describes them. `groups` are the prompts'
    positions. `experts` has the experts of samples' tokens, if servers reported them (`SampleTable.experts`)."""
    per_token: Arrays = {
        "tokens": np.concatenate([part for s in samples for part in (s.prompt_tokens, s.tokens)]).astype(np.int32),
        "rollout_logprobs": np.concatenate([s.logprobs for s in samples]).astype(np.float32),
    }
    references = [s.ref_logprobs for s in samples if s.ref_logprobs is not None]
    if len(references) == len(samples):  # an earlier release also scored samples whose reference nobody reads
        per_token["ref_logprobs"] = np.concatenate(references).astype(np.float32)
    values = [s.values for s in samples if s.values is not None]
    if len(values) == len(samples):  # discarded episodes have none of a job without a critic
        per_token["values"] = np.concatenate(values).astype(np.float32)
    per_sample: Arrays = {
        "prompt_lengths": np.array([len(s.prompt_tokens) for s in samples], np.int32),
        "response_lengths": np.array([len(s.tokens) for s in samples], np.int32),
        "scores": np.array([s.reward for s in samples], np.float32),
        "groups": np.array([s.key.prompt for s in samples], np.int32),
        "finished": np.array([s.finished for s in samples], np.uint8),
    }
    pads: dict[str, float] = {**dict.fromkeys(per_token, 0), "tokens": pad}
    if not any(len(s.tokens) for s in samples):
        raise ValueError("no sample has a response token")
    if experts:
        per_token["routed_experts"], per_sample["unknown_experts"] = routed_experts(samples, experts)
        pads["routed_experts"] = UNKNOWN
    return SampleArrays(per_token | per_sample, pads)


def episode_arrays(samples: Sequence[Sample], episodes: Mapping[Key, StoredEpisode], compares: bool) -> Arrays:
    """The arrays that say what of episodes is learnt: `learnt` (N,R) uint8, and `groups` (N,) int32. {} without
    episodes.

    A discarded episode is alone in its group, so no other's baseline has it. `compares` says that the advantage
    compares the samples of a group. Then an episode that has no other to be compared with is not learnt."""
    if not episodes:
        return {}
    left = Counter(s.key.prompt for s in samples if not episodes[s.key].discarded)
    learnt = np.zeros((len(samples), max(len(s.tokens) for s in samples)), np.uint8)
    groups = np.array([s.key.prompt for s in samples], np.int32)
    for row, sample in enumerate(samples):
        found = episodes[sample.key]
        if found.discarded:
            groups[row] = -1 - row
        elif left[sample.key.prompt] > 1 or not compares:
            learnt[row, : len(found.learnt)] = found.learnt
    return {"learnt": learnt, "groups": groups}


def routed_experts(
    samples: Sequence[Sample], experts: Mapping[Key, Sequence[tuple[int, bytes]]]
) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """The experts of all tokens, (tokens, layers, experts of a token), and for each sample the number of tokens whose
    experts are not known, (N,). The last token of a sample does not count, because nothing depends on its experts. It
    is UNKNOWN where no server reported any."""
    lengths = [len(s.prompt_tokens) + len(s.tokens) for s in samples]
    rows = [whole(experts.get(s.key, ()), length) for s, length in zip(samples, lengths, strict=True)]
    shape = next(row.shape[1:] for row in rows if row is not None)
    table = np.full((sum(lengths), *shape), UNKNOWN, np.int16)
    unknown = np.zeros(len(samples), np.int32)
    at = 0
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row is not None:
            table[at : at + len(row)] = row
        unknown[i] = (table[at : at + length - 1, 0, 0] < 0).sum()
        at += length
    return table, unknown


class ExperienceFiles:
    """The batches `ppo/<iteration>` as files, so that a step can be replayed bit for bit. A file is written completely
    or not at all."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "experience"
        self._known: dict[int, str] = {}
        self._dir.mkdir(parents=True, exist_ok=True)

    def _path(self, iteration: int) -> Path:
        return self._dir / f"{iteration:06d}.safetensors"

    def write(self, iteration: int, arrays: Mapping[str, NDArray[np.generic]]) -> str:
        """Write the iteration's batch. It is on the disk on return. Returns the content's digest."""
        digest = hashlib.sha256()

        def hashed() -> Iterator[bytes | memoryview]:
            for piece in pieces(arrays):
                digest.update(piece)
                yield piece

        write_pieces(self._path(iteration), hashed())
        self._known[iteration] = digest.hexdigest()
        return self._known[iteration]

    def checked(self, iteration: int, digest: str | None = None) -> Path:
        """The file of the iteration's batch. Raises KeyError if it was not stored, or was dropped after a checkpoint,
        and ValueError with a sentence if the file does not have this `digest`."""
        path = self._path(iteration)
        if not path.is_file():
            raise KeyError(f"ppo/{iteration}")
        if digest is not None and self._known.get(iteration) != digest:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                raise ValueError(
                    f"{path} is damaged or of another run: its content is not what the run stored; put a copy of the "
                    "file back, or start a new run"
                )
            self._known[iteration] = digest
        return path

    def read(self, iteration: int, digest: str | None = None) -> bytes:
        """The content of `checked`. Raises the same errors."""
        return self.checked(iteration, digest).read_bytes()

    def has(self, iteration: int) -> bool:
        """Whether the iteration is stored."""
        return self._path(iteration).is_file()

    def forget_through(self, iteration: int) -> None:
        """Drop the iterations up to and including this one. Call it when a checkpoint covers them."""
        for path in self._dir.glob("*.safetensors"):
            if path.stem.isdecimal() and int(path.stem) <= iteration:
                path.unlink(missing_ok=True)
