"""Keeps the samples of PPO iterations as text for people. Each iteration has one file, such as
`samples/iteration-000012.jsonl`.

Training does not read these files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from dovetail.coordinator.store.episodes import StoredEpisode, told_of
from dovetail.protocol.experience import kl_per_sample
from dovetail.protocol.files.durable import write_whole

if TYPE_CHECKING:
    from dovetail.coordinator.store.samples import Key, Sample
    from dovetail.protocol.experience import Experience

FOLDER = "samples"
_NAME = re.compile(r"(iteration|evaluation)-(\d+|before-sft)\.jsonl")
# This version stands for the model before SFT. Its weights are no version of PPO.
BEFORE_SFT = -1

# Texts in logs are cut to this many characters.
SHOWN = 400

Row = dict[str, Any]


def weights_name(version: int) -> str:
    """The name of a weight version in messages."""
    return "the weights before SFT" if version == BEFORE_SFT else f"weight version {version}"


def sample_rows(
    experience: Experience,
    samples: Sequence[Sample],
    rewards: Mapping[Key, Mapping[str, float]],
    episodes: Mapping[Key, StoredEpisode],
) -> list[Row]:
    """One JSON object for each sample, in order of (prompt, sample).

    `samples` are those of the experience, in the same order. `rewards` has the rewards that reward functions returned,
    by sample and function. The rows have them as `rewards`. With `episodes`, the rows of a job with sessions also say
    how each ended (`episode`). Their `response` has the tokens that end it, and their
    `reward` is the score that was trained on. `kl` is in nats, summed over the response. `first_version` and
    `weight_version` are the weights of the first token and of the last server."""
    scores, kl = experience.scores, kl_per_sample(experience.arrays)
    divergences: Iterable[float | None] = [None] * len(samples) if kl is None else kl.tolist()
    return [
        {
            "iteration": experience.iteration,
            "prompt_index": sample.key.prompt,
            "sample_index": sample.key.sample,
            "prompt": prompt,
            "response": response,
            "tokens": len(sample.tokens),
            "finish_reason": sample.finish_reason,
            "reward": _number(score),
            "rewards": dict(sorted(rewards.get(sample.key, {}).items())),
            "kl": None if divergence is None else _number(divergence),
            "weight_version": sample.weight_version,
            "first_version": sample.first_version,
            "rollout": sample.instance,
            "assignments": sample.attempt,
            "fields": sample.fields,
            **({"episode": told_of(episodes[sample.key])} if episodes else {}),
        }
        for prompt, response, sample, score, divergence in zip(
            experience.prompts, experience.raw or experience.responses, samples, scores, divergences, strict=True
        )
    ]


def _number(value: SupportsFloat) -> float | None:
    """The number for JSON. JSON has no infinity and no NaN, so these become None."""
    return float(value) if math.isfinite(value) else None


def best_and_worst(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """('best', row) and ('worst', row) by reward. Among equal rewards the first row counts.

    If all rewards are equal, the result has only the best row. It is empty if no reward is finite."""
    rewarded = [row for row in rows if isinstance(row.get("reward"), int | float)]
    if not rewarded:
        return []
    best = max(rewarded, key=lambda row: float(row["reward"]))
    worst = min(rewarded, key=lambda row: float(row["reward"]))
    return [("best", best)] if best is worst else [("best", best), ("worst", worst)]


def shortened(text: str) -> str:
    """The text, or its beginning and its end with `…` between them."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-(SHOWN // 2) :]}"


class SampleFiles:
    """Keeps the files of the newest iterations. Together they have at most `keep_bytes`, but the newest one is always
    kept. It may be called in any thread."""

    def __init__(self, run_dir: Path, keep_bytes: int) -> None:
        self._dir = run_dir / FOLDER
        self._keep = keep_bytes
        self._lock = threading.Lock()

    def write(self, iteration: int, rows: Iterable[Row]) -> None:
        """Write an iteration's file atomically, and replace an older one. Then delete files beyond the limit. Raises
        OSError."""
        with self._lock:
            self._write(f"iteration-{iteration:06d}.jsonl", rows)
            self._tidy(iteration)

    def write_evaluation(self, version: int, rows: Iterable[Row]) -> None:
        """Write the answers of an evaluation of the weights after iteration `version`. Raises OSError."""
        number = "before-sft" if version == BEFORE_SFT else f"{version:06d}"
        with self._lock:
            self._write(f"evaluation-{number}.jsonl", rows)
            self._tidy(None)

    def _tidy(self, newest: int | None) -> None:
        """Delete the oldest files beyond the limit. The iteration `newest`, the first and the last evaluation, and the
        evaluation before SFT are never deleted. Evaluations are kept longer than iterations."""
        evaluations, iterations = evaluation_files(self._dir.parent), files(self._dir.parent)
        left = self._keep
        versions = evaluations.keys() - {BEFORE_SFT}
        ends = {BEFORE_SFT, min(versions, default=0), max(versions, default=0)}
        order = sorted(evaluations, key=lambda version: (version not in ends, -version))
        for version in order:
            left -= evaluations[version].stat().st_size
            if left < 0 and version not in ends:
                evaluations[version].unlink(missing_ok=True)
        for number, older in sorted(iterations.items(), reverse=True):
            left -= older.stat().st_size
            if left < 0 and number != newest and number != max(iterations):
                older.unlink(missing_ok=True)

    def _write(self, name: str, rows: Iterable[Row]) -> None:
        self._dir.mkdir(exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        write_whole(self._dir / name, text.encode())


def files(run_dir: Path) -> dict[int, Path]:
    """The files of a run's iterations by their number. {} if it has none."""
    return _found(run_dir, "iteration")


def evaluation_files(run_dir: Path) -> dict[int, Path]:
    """The files of a run's evaluations, by the iteration after which the weights were evaluated. The key BEFORE_SFT has
    the file of the model before SFT."""
    return _found(run_dir, "evaluation")


def _found(run_dir: Path, kind: str) -> dict[int, Path]:
    try:
        names = os.listdir(run_dir / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    numbered = ((found[2], run_dir / FOLDER / name) for name, found in matches if found and found[1] == kind)
    return {int(number) if number.isdecimal() else BEFORE_SFT: path for number, path in numbered}


def regular(path: str, flags: int) -> int:
    """An opener for files in the folder of a run. Raises OSError for a FIFO or a device, which could be read for
    ever."""
    file = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_rows(path: Path) -> list[Row]:
    """The rows of one file. Raises OSError, and ValueError with a sentence if a line is not a JSON object."""
    return list(rows_from(path, 0))


def rows_from(path: Path, start: int) -> Iterator[Row]:
    """The rows from number `start` on. Earlier rows are not parsed. Raises the same errors as `read_rows`."""
    with open(path, encoding="utf-8", opener=regular) as file:
        for number, line in islice(enumerate(file, 1), start, None):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
            yield row
