"""Shows the samples of a run as text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.sample_files import (
    BEFORE_SFT,
    FOLDER,
    Row,
    evaluation_files,
    files,
    read_rows,
)
from dovetail.protocol.errors import RunError, UsageError


def read(run_dir: Path, iterations: Sequence[int] = (), *, evaluation: bool = False) -> list[Row]:
    """The samples of some iterations, or of the last one that is kept. `evaluation`: read the answers of evaluations
    instead. Raises UsageError if the run kept no samples of an iteration, and RunError if a file cannot be read."""
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir} does not exist; name the folder of a run, for example runs/quickstart")
    found = evaluation_files(run_dir) if evaluation else files(run_dir)
    if not found:
        what = (
            ("answers of an evaluation", "an evaluation") if evaluation else ("samples", "a PPO iteration's generation")
        )
        raise UsageError(
            f"{run_dir / FOLDER} holds no {what[0]}: the run has not finished {what[1]}, or "
            "spec.samples.keepMegabytes is 0"
        )
    wanted = list(iterations) or [max(found)]
    missing = [i for i in wanted if i not in found]
    if missing and missing[0] == BEFORE_SFT:
        raise UsageError(
            "there are no answers before SFT: only a job with the stages sft and ppo has them"
            if evaluation
            else "iteration -1 stands for the model before SFT; --evaluation shows its answers"
        )
    if missing:
        numbered = sorted(found.keys() - {BEFORE_SFT})
        raise UsageError(
            f"the {'answers after' if evaluation else 'samples of'} iteration {missing[0]} are not kept; there are "
            f"those of {_ranges(numbered) if numbered else 'iteration -1 (before SFT)'}. A higher "
            "spec.samples.keepMegabytes keeps more"
        )
    try:
        return [row for iteration in wanted for row in read_rows(found[iteration])]
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text, such as 'iterations 1 to 4, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return "iterations " + ", ".join(" to ".join(str(n) for n in part) for part in parts)


_TEXTS = ("prompt", "response")


def printable(text: str) -> str:
    """The text without characters that move a terminal's cursor or change its colours. A model may write anything."""
    return "".join(c if c.isprintable() or _harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _harmless(character: str) -> bool:
    """Whether a character may be shown although Python does not call it printable. These are spaces of any kind, line
    breaks, tabs, and the joiners that Persian, Hindi and emoji need."""
    return character in "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}" or unicodedata.category(character) == "Zs"


def facts_of(row: Mapping[str, Any]) -> str:
    """The figures of a sample, as 'reward 1.25 (fluency 1, length 0.25), KL 0.31, 24 tokens, cut at the limit'."""
    parts = []
    if isinstance(row.get("reward"), int | float):
        made_of = ", ".join(f"{printable(name)} {value:.4g}" for name, value in (row.get("rewards") or {}).items())
        parts.append(f"reward {row['reward']:.4g}" + (f" ({made_of})" if made_of else ""))
    for name, value in (row.get("measures") or {}).items():
        parts.append(f"{printable(name)} {value:.4g}")
    if isinstance(row.get("kl"), int | float):
        parts.append(f"KL {row['kl']:.3g}")
    if isinstance(row.get("tokens"), int):
        parts.append(f"{row['tokens']} token{'' if row['tokens'] == 1 else 's'}")
    if (episode := row.get("episode")) is not None:
        parts.append(f"{episode['turns']} turns, {episode['calls']} calls, {episode['ending']}")
        parts += [printable(episode["why"])] * bool(episode["why"]) + ["discarded"] * bool(episode["discarded"])
    elif row.get("finish_reason") == "length":
        parts.append("cut at the limit")
    return ", ".join(parts)


def texts_of(row: Mapping[str, Any], keys: Sequence[str] = _TEXTS) -> list[str]:
    """Prompt and response, or other texts of the row, as lines with a margin."""
    return [
        f"  {key + ':' if not number else '':<9} {line}"
        for key in keys
        for number, line in enumerate(printable(str(row[key])).split("\n"))
    ]


def _evaluation(version: int) -> str:
    return "evaluation before SFT" if version == BEFORE_SFT else f"evaluation after iteration {version}"


def session_lines(row: Mapping[str, Any]) -> list[str]:
    """An episode turn by turn, as lines. Raises UsageError if the row is none."""
    if (episode := row.get("episode")) is None:
        raise UsageError("this run's samples are no episodes: --session is for a job with spec.sessions")
    messages, runs = episode["messages"], episode.get("tokens") or []
    learnt = [count for kind, count in runs if kind == "learnt"]
    last = len(messages) - 1
    first = len(messages) - episode["turns"] - episode["calls"]
    lines, turn = [f"{_place(row)}: {facts_of(row)}"], 0
    for number, (message, said) in enumerate(zip(messages, spoken(episode), strict=True)):
        if message["role"] == "assistant" and number >= first:
            turn += 1
            # Where an agent has several conversations, the messages are those of the last one.
            known = len(learnt) == episode["turns"] and first >= 0
            lines.append(f"turn {turn}" + (f", {learnt[turn - 1]} tokens learnt" if known else ""))
        lines += texts_of(said, list(said))
        if number == last and episode["discarded"]:
            lines.append(f"then {episode['ending']}: {printable(episode['why'])}".removesuffix(": "))
    return [*lines, *_drawn(row, episode)]


def described(row: Mapping[str, Any]) -> list[str]:
    """One row of a file as lines."""
    place = _place(row)
    if (episode := row.get("episode")) is None or not episode["messages"]:
        return [f"{place}: {facts_of(row)}", *texts_of(row)]
    lines = [line for said in spoken(episode) for line in texts_of(said, list(said))]
    return [f"{place}: {facts_of(row)}", *lines, *_drawn(row, episode)]


def _place(row: Mapping[str, Any]) -> str:
    where = f"iteration {row['iteration']}" if "iteration" in row else _evaluation(row["version"])
    return f"{where}, prompt {row['prompt_index']}, sample {row['sample_index']}"


def _drawn(row: Mapping[str, Any], episode: Mapping[str, Any]) -> list[str]:
    """What an episode's tokens are, and who drew them, as lines."""
    runs = ", ".join(f"{count} {kind}" for kind, count in episode.get("tokens", ()))
    drawn = f"weights {row['weight_version']} on {row['rollout']}" if row.get("rollout") else ""
    return [f"  {name + ':':<9} {text}" for name, text in (("tokens", runs), ("drawn", drawn)) if text]


def spoken(episode: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of an episode, each as its role and its text. A call of a tool is written as name(arguments)."""
    found = []
    for message in episode["messages"]:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        texts = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
        found.append({message["role"]: "\n".join([*filter(None, [message["content"]]), *texts])})
    return found
