"""Reads what other trainers write of their rollouts, and says which prompts one dump lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dovetail.protocol.errors import UsageError

# The names of the fields, by trainer: verl's trainer.rollout_data_dir, TRL's log_completions, and files of one's own.
PROMPT = ("prompt", "input", "query")
RESPONSE = ("completion", "output", "response")
STEP = ("step", "global_step", "iteration")
_SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\s+")


@dataclass
class Dumped:
    """A prompt in a dump. `steps` are those in which it was trained, and `lengths` the characters of its responses."""

    text: str
    steps: set[int] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """The mean length of its responses, in characters, or of the prompt if there are none."""
        return fmean(self.lengths) if self.lengths else float(len(self.text))


def key(text: str) -> str:
    """The text without special tokens and white space, which trainers write and leave out as they like."""
    return _SPECIAL.sub("", text)


def read_dump(path: Path) -> dict[str, Dumped]:
    """The prompts of a dump by `key`: one file, or a folder with a file for each step. Raises UsageError for a dump
    without prompts."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".parquet"))
    found: dict[str, Dumped] = {}
    for number, file in enumerate(files, 1):
        default = int(file.stem) if file.stem.isdecimal() else number
        for row in _rows(file):
            text, said = _text(_first(row, PROMPT)), _first(row, RESPONSE)
            if not text:
                continue
            prompt = found.setdefault(key(text), Dumped(text))
            step = _first(row, STEP)
            prompt.steps.add(int(step) if isinstance(step, int | float) else default)
            if said is not None:
                prompt.lengths.append(len(_text(said)))
    if not found:
        raise UsageError(
            f"{path} has no prompts: it is a .jsonl or .parquet file, or a folder of them, whose rows have a field "
            f"{', '.join(PROMPT[:-1])} or {PROMPT[-1]}"
        )
    return found


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file).to_pylist()
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{file}, line {number} is not JSON: {error}") from error
            if isinstance(row, dict):
                yield row


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str:
    """A text, or the texts of a conversation's messages."""
    if isinstance(value, list):
        return "\n".join(str(each.get("content", "")) if isinstance(each, dict) else str(each) for each in value)
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Compared:
    """The prompts that should have been trained: those that the dump has, those that it lacks, and those that it
    trained in more steps than it should have."""

    kept: list[Dumped]
    lost: list[Dumped]
    repeated: list[Dumped]

    def sentence(self) -> str:
        asked = len(self.kept) + len(self.lost)
        share = len(self.lost) / max(1, asked)
        told = f"{len(self.lost):,} of {asked:,} prompts ({share:.0%}) were lost, and {len(self.repeated):,} repeated"
        if not self.lost or not self.kept:
            return f"{told}."
        lost, kept = (fmean(p.length for p in prompts) for prompts in (self.lost, self.kept))
        return f"{told}. Lost: {lost:,.0f} characters on average. Kept: {kept:,.0f}."


def compare(undisturbed: Mapping[str, Dumped], dump: Mapping[str, Dumped]) -> Compared:
    """What a dump lacks and repeats of the prompts that an undisturbed run trained up to the dump's last step."""
    last = max(step for prompt in dump.values() for step in prompt.steps)
    times = {name: sum(step <= last for step in prompt.steps) for name, prompt in undisturbed.items()}
    asked = [name for name, count in times.items() if count]
    return Compared(
        [undisturbed[name] for name in asked if name in dump],
        [undisturbed[name] for name in asked if name not in dump],
        [undisturbed[name] for name in asked if name in dump and len(dump[name].steps) > times[name]],
    )
