"""Shows the samples of an iteration as a table, and the life of one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from dovetail.coordinator.reporting.sample_files import Row
from dovetail.coordinator.reporting.sample_texts import spoken

Document = dict[str, Any]
# The maximum number of rows of one table, and of characters of a text in it.
ROWS = 2000
TEXT = 160
# Prompts mark who speaks with a chat template's roles, or with the words of Anthropic's HH data.
_TURN = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)\n|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n*"
    r"|(?:^|\n\n)(?P<hh>Human|Assistant|User|System):[ \n]?"
)
_END = re.compile(r"\s*(?:<\|im_end\|>|<\|eot_id\|>)\s*$")


def table(rows: Sequence[Row], moves: Sequence[Document]) -> Document:
    """The first ROWS samples, with what happened to them on their way. `moves` has the events of the iteration's
    samples.

    Of the `groups` prompts with several samples, `equal_groups` have samples with equal rewards."""
    by_sample: dict[tuple[int, int], list[Document]] = {}
    for event in moves:
        by_sample.setdefault(tuple(event["sample"][1:]), []).append(event)
    rewards: dict[int, list[Any]] = {}
    for row in rows:
        rewards.setdefault(row.get("prompt_index", 0), []).append(row.get("reward"))
    compared = {prompt: values for prompt, values in rewards.items() if len(values) > 1}
    equal = {prompt for prompt, values in compared.items() if len(set(values)) == 1}
    return {
        "rows": [_line(row, by_sample.get(_place(row), []), equal) for row in rows[:ROWS]],
        "left_out": max(0, len(rows) - ROWS),
        "groups": len(compared),
        "equal_groups": len(equal),
    }


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(row.get("prompt_index", 0)), int(row.get("sample_index", 0))


def _line(row: Row, moves: Sequence[Document], equal: set[int]) -> Document:
    prompt, sample = _place(row)
    return {
        "prompt": prompt,
        "sample": sample,
        "asked": _short(row.get("prompt")),
        "answer": _short(row.get("response")),
        "tokens": row.get("tokens"),
        "reward": row.get("reward"),
        "rewards": row.get("rewards") or row.get("measures") or {},
        "kl": row.get("kl"),
        "cut": row.get("finish_reason") == "length",
        "staleness": staleness(row),
        "server": row.get("rollout"),
        "migrations": sum(event["event"] == "sample.moved" for event in moves),
        "retries": sum(event["event"] == "sample.retried" for event in moves),
        "equal_group": prompt in equal,
    }


def _short(text: Any) -> str:
    flat = " ".join(str(text or "").split())
    return flat if len(flat) <= TEXT else flat[: TEXT - 1] + "…"


def staleness(row: Mapping[str, Any]) -> int | None:
    """The number of iterations by which the weights that generated the sample are older than the weights that learn
    from it."""
    iteration, version = row.get("iteration"), row.get("weight_version")
    return iteration - 1 - version if isinstance(iteration, int) and isinstance(version, int) else None


def turns(prompt: str, response: str, episode: Mapping[str, Any] | None = None) -> list[Document]:
    """The turns of the prompt with their speakers, and then the response. The prompt's own marks divide it into turns.
    Only the response is learnt. Of an episode these are its messages, and what the model said last and called is
    learnt."""
    if episode is not None and episode["messages"]:
        told = [each for said in spoken(episode) for each in said.items()]
        first = len(told) - episode["turns"] - episode["calls"]
        return [
            {"role": role, "text": text, "learnt": role == "assistant" and place >= first and not episode["discarded"]}
            for place, (role, text) in enumerate(told)
        ]
    marks = list(_TURN.finditer(prompt))
    found = []
    head = prompt[: marks[0].start()] if marks else prompt
    if head.strip():
        found.append({"role": "prompt", "text": head.strip("\n"), "learnt": False})
    for mark, following in zip_longest(marks, marks[1:]):
        text = _END.sub("", prompt[mark.end() : following.start() if following else len(prompt)])
        role = (mark["chatml"] or mark["llama"] or mark["hh"]).lower()
        if text.strip():
            found.append({"role": {"human": "user"}.get(role, role), "text": text, "learnt": False})
    return [*found, {"role": "assistant", "text": response, "learnt": True}]


def life(row: Mapping[str, Any], moves: Sequence[Document]) -> Document:
    """The servers and weight versions that generated a sample.

    Each of `parts` says that `server` made the tokens `from` to `to` with weights `version`. `steps` says in sentences
    what happened in between, with the time if it is known (seconds since the epoch)."""
    moved = sorted((e for e in moves if e["event"] == "sample.moved"), key=lambda event: event.get("time") or 0.0)
    last_version, tokens = row.get("weight_version"), int(row.get("tokens") or 0)
    first_version = row.get("first_version", last_version)
    server = str(moved[0].get("source") if moved else row.get("rollout") or "")
    parts, at = [], 0
    steps: list[Document] = [{"time": None, "text": f"begun on {server} with weights {_of(first_version)}"}]
    for event in moved:
        upto = min(tokens, int(event.get("tokens") or 0))
        if upto > at:
            parts.append({"server": server, "from": at, "to": upto, "version": first_version})
            at = upto
        server = str(event.get("instance") or "")
        steps.append({"time": event.get("time"), "text": _move(event)})
    steps += [
        {"time": e.get("time"), "text": f"failed on {e.get('instance')}: {e.get('reason')}"}
        for e in moves
        if e["event"] == "sample.retried"
    ]
    if tokens > at:
        parts.append({"server": server, "from": at, "to": tokens, "version": last_version})
    ended = "cut at the limit" if row.get("finish_reason") == "length" else "ended by itself"
    steps.append({"time": None, "text": f"{ended} on {server} after {tokens} tokens, with weights {_of(last_version)}"})
    if isinstance(row.get("reward"), int | float):
        steps.append({"time": None, "text": f"scored {row['reward']:.4g}"})
    if row.get("iteration") is not None:
        steps.append({"time": None, "text": f"learnt in iteration {row['iteration']}"})
    return {"parts": parts, "steps": steps}


def _of(version: Any) -> str:
    return "of an unknown version" if version is None else str(version)


def _move(event: Mapping[str, Any]) -> str:
    how = {"kv": "with its keys and values", "tokens": "whose tokens were computed again"}
    seconds = event.get("seconds")
    took = f", {1e3 * seconds:.0f} ms" if isinstance(seconds, int | float) else ""
    return (
        f"moved from {event.get('source')} to {event.get('instance')} at token {event.get('tokens')}, "
        f"{how.get(str(event.get('mechanism')), '')} ({event.get('reason')}{took})"
    )
