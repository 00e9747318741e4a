"""Answers the run page's questions about a run from its folder. A question is a path such as `samples/12`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.reporting.bill import NEWEST, Bill, sentences
from dovetail.coordinator.reporting.page.iteration_timeline import as_run, schedule_document, timeline
from dovetail.coordinator.reporting.page.overview import SeenRun, last_of_each_step, line, overview, plan_against_actual
from dovetail.coordinator.reporting.page.rollout_table import life, staleness, table, turns
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, Row
from dovetail.manifest.types import RLHFJob, Stage
from dovetail.protocol.files.run_rows import QUESTION
from dovetail.protocol.wire import Arrays
from dovetail.web.page_files import frozen_page

Document = dict[str, Any]
# The maximum number of rows of history in one answer. A row has up to 3 KB, and the status API takes answers of 8 MiB.
ROWS = 2000
# The maximum number of bytes of samples in one answer.
SAMPLE_BYTES = 4 << 20


class NotKept(LookupError):
    """The run has no such data, or no longer keeps it. The message is one sentence for the user."""


class PageDocuments:
    """Answers the page's questions about one run. It may be used from several threads. `bill` is the run's, by default
    one without prices."""

    def __init__(self, folder: RunFolder, bill: Bill | None = None) -> None:
        self.folder, self.bill = folder, bill or Bill(folder)
        self._answers: dict[str, Callable[..., Document]] = {
            "history": self._history,
            "samples": self._samples,
            "samples/rows": self._sample_rows,
            "evaluation": self._evaluation,
            "evaluation/rows": self._evaluation_rows,
            "sample": self._sample,
            "timeline": self._timeline,
            "schedule": self._schedule,
        }

    def line(self, now: float, alive: bool | None) -> Document:
        """The run's line in a list of runs."""
        return line(self._seen(now, alive, {}))

    def answer(self, question: str, now: float, alive: bool | None) -> bytes:
        """The answer to a question, as JSON. `now` is in seconds since the epoch. `alive` says whether the run's
        coordinator is running, and is None if that is unknown.

        Raises NotKept."""
        if not re.fullmatch(QUESTION, question):
            raise NotKept("there is no such page")
        parts = question.split("/")
        numbers = [int(part) for part in parts if re.fullmatch("-?[0-9]+", part)]
        kind = "/".join(part for part in parts if not re.fullmatch("-?[0-9]+", part))
        if kind == "overview":
            return encode(overview(self._seen(now, alive, self._kept())))
        if kind == "events":
            return encode({"events": self.folder.events()})
        if kind == "bill":
            bill = self.bill.document(NEWEST if alive else None)
            return encode({**bill, "sentences": sentences(bill)})
        return encode(self._answers[kind](*numbers))

    def _kept(self) -> Document:
        """The data that the page can show, by kind."""
        folder = self.folder
        return {
            "sample_iterations": folder.sample_iterations(),
            "evaluations": folder.evaluations(),
            "trace_iterations": folder.trace_iterations(),
            "token_iterations": folder.batch_iterations(),
            "has_schedule": folder.has_schedule(),
            "models": folder.models(),
        }

    def _seen(self, now: float, alive: bool | None, kept: Document) -> SeenRun:
        folder = self.folder
        job, plan, summary = folder.job(), folder.plan(), folder.summary()
        name = folder.path.name
        return SeenRun(name, job, folder.parsed_job(), plan, summary, folder.rows(), alive, now, kept)

    def _history(self, offset: int) -> Document:
        rows = self.folder.rows()
        part = rows[offset : offset + ROWS]
        return {"rows": part, "next": min(len(rows), offset + len(part)), "more": offset + len(part) < len(rows)}

    def _samples(self, iteration: int) -> Document:
        if not (rows := self.folder.samples(iteration)):
            raise _no_samples(iteration)
        return {"iteration": iteration, **table(rows, self.folder.moves(iteration))}

    def _evaluation(self, version: int) -> Document:
        if not (rows := self.folder.evaluation(version)):
            raise _no_answers(version)
        return {"iteration": version, **table(rows, ())}

    def _sample_rows(self, iteration: int, offset: int) -> Document:
        found = part_of(self.folder.samples_from(iteration, offset), offset, _no_samples(iteration))
        return {"iteration": iteration, **found}

    def _evaluation_rows(self, version: int, offset: int) -> Document:
        found = part_of(self.folder.evaluation_from(version, offset), offset, _no_answers(version))
        return {"iteration": version, **found}

    def _sample(self, iteration: int, prompt: int, sample: int) -> Document:
        rows = self.folder.samples(iteration)
        place = next((i for i, row in enumerate(rows) if _key(row) == [prompt, sample]), None)
        if place is None:
            raise NotKept(f"iteration {iteration} keeps no sample {sample} of prompt {prompt}")
        row = rows[place]
        moves = [move for move in self.folder.moves(iteration) if move["sample"] == [iteration, prompt, sample]]
        group = [r.get("reward") for r in rows if r.get("prompt_index", 0) == prompt]
        batch, number = self.folder.batch(iteration), sum(r.get("prompt_index", 0) == prompt for r in rows[:place])
        equal = len(group) > 1 and len(set(group)) == 1
        return {
            **{key: row.get(key) for key in _SHOWN},
            "staleness": staleness(row),
            "turns": turns(str(row.get("prompt") or ""), str(row.get("response") or ""), row.get("episode")),
            "life": life(row, moves),
            "not_learnt": not_learnt(self.folder.parsed_job(), row, equal),
            "tokens_of": token_document(batch, batch_row(batch, prompt, number), self.folder.path),
            "before": _place(rows, place - 1),
            "after": _place(rows, place + 1),
        }

    def _timeline(self, iteration: int) -> Document:
        trace = self.folder.trace(iteration)
        if not trace:
            raise NotKept(f"there is no timeline of iteration {iteration}")
        steps = last_of_each_step(self.folder.rows(), Stage.PPO.value)
        row = steps.get(iteration)
        prediction = self.folder.plan().get("prediction")
        plan = plan_against_actual(prediction, [row["metrics"]]) if row is not None else []
        return {"iteration": iteration, "plan": plan, **timeline(trace)}

    def _schedule(self, iteration: int) -> Document:
        schedule = self.folder.schedule()
        if not schedule:
            raise NotKept("this run has only one possible schedule of training")
        trace = self.folder.trace(iteration)
        return schedule_document(schedule, as_run(timeline(trace)) if trace else [], iteration)


_SHOWN = (
    *("iteration", "prompt_index", "sample_index", "prompt", "response", "tokens", "reward", "rewards", "kl"),
    *("finish_reason", "weight_version", "first_version", "rollout", "assignments", "fields"),
)


def _key(row: Row) -> list[int]:
    """Which sample it is. A damaged row may not say it."""
    return [row.get("prompt_index", 0), row.get("sample_index", 0)]


def _place(rows: list[Document], index: int) -> list[int] | None:
    """The [prompt, sample] of row `index`, or None if there is no such row."""
    return _key(rows[index]) if 0 <= index < len(rows) else None


def _no_samples(iteration: int) -> NotKept:
    return NotKept(f"the samples of iteration {iteration} are not kept; spec.samples.keepMegabytes says how many are")


def _no_answers(version: int) -> NotKept:
    when = "before SFT" if version == BEFORE_SFT else f"after iteration {version}"
    return NotKept(f"the answers of the evaluation {when} are not kept")


def part_of(rows: Iterator[Row], offset: int, problem: NotKept) -> Document:
    """The first of these rows, which begin with number `offset`. There is at least one. Together they have at most
    SAMPLE_BYTES, unless the first one alone is larger. `next` is the offset of the following rows, and `more` says
    whether there are any. Raises `problem` if the file has no rows, or if one cannot be read."""
    part: list[Row] = []
    size, more = 0, False
    try:
        for row in rows:
            size += len(encode(row))
            if size > SAMPLE_BYTES and part:
                more = True
                break
            part.append(row)
    except (OSError, ValueError) as error:
        raise problem from error
    if not part and offset == 0:
        raise problem
    return {"rows": part, "next": offset + len(part), "more": more}


def encode(document: Any) -> bytes:
    """The document as JSON. Numbers that are not finite become null, because JSON has no such numbers."""
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    except ValueError:
        return json.dumps(_finite(document), ensure_ascii=False).encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan_page(name: str, plan: Document) -> bytes:
    """A page that shows a plan only, as one HTML file. `plan` has a title, facts, phases as [name, seconds], lanes of
    bars [name, start, end, detail] in `unit`, and tables."""
    about = {"source": "file", "plan": True, "run": name, "written": time.time(), "left_out": ""}
    return frozen_page(encode({"about": about, "answers": {"plan": plan}}))


# The maximum number of tokens that are shown of a prompt, and of a response.
TOKENS = 4000


def token_texts(run_dir: Path, ids: list[int]) -> list[str] | None:
    """The text of each token. Joined they are the whole text. None without the run's tokenizer."""
    path = run_dir / "tokenizer" / "tokenizer.json"
    try:
        from tokenizers.decoders import DecodeStream

        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    except Exception:  # the library raises plain Exception for a file that it does not understand
        return None
    stream = DecodeStream(skip_special_tokens=False)
    # A token that ends within a character has no text. The next token has the whole character.
    return [stream.step(tokenizer, token) or "" for token in ids]


@lru_cache(maxsize=1)
def _tokenizer(path: Path, _changed: int) -> Any:
    """The tokenizer in a file, which takes long to read. `_changed`: the time of its last change."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def batch_row(arrays: Arrays, prompt: int, number: int) -> int:
    """The row of the batch with the prompt's `number`-th sample, or -1 if there is none."""
    rows = np.flatnonzero(arrays["groups"] == prompt) if arrays else np.empty(0, np.intp)
    return int(rows[number]) if number < len(rows) else -1


def token_document(arrays: Arrays, row: int, run_dir: Path) -> Document:
    """A sample's tokens. `prompt` and `response` have the texts of their tokens. For each token of the response there
    are its `logprob` when it was sampled, and its `reference`, `value` and `advantage`, if the batch has them. {} if
    the batch or the tokenizer is missing."""
    if not arrays or not 0 <= row < len(arrays["tokens"]):
        return {}
    begin, count = int(arrays["prompt_lengths"][row]), int(arrays["response_lengths"][row])
    ids = [int(token) for token in arrays["tokens"][row, : begin + count]]
    texts = token_texts(run_dir, ids)
    if texts is None:
        return {}
    named = {"logprob": "rollout_logprobs", "reference": "ref_logprobs", "value": "values", "advantage": "advantages"}
    return {
        "prompt": texts[:begin][-TOKENS:],
        "response": texts[begin:][:TOKENS],
        "left_out": max(0, begin - TOKENS) + max(0, count - TOKENS),
        **{
            name: [round(float(x), 4) for x in np.asarray(arrays[key], np.float32)[row, : min(count, TOKENS)]]
            for name, key in named.items()
            if key in arrays
        },
    }


def not_learnt(job: RLHFJob | None, row: Row, equal_group: bool) -> str:
    """The reason why nothing is learnt from the response. Empty if it is learnt."""
    if (row.get("episode") or {}).get("discarded"):
        return f"the episode was discarded: {row['episode']['ending']}"
    if job is None:
        return ""
    if job.spec.ppo.mask_truncated and row.get("finish_reason") == "length":
        return "it was cut at the limit, and ppo.maskTruncated is set"
    if job.spec.ppo.drop_equal_groups and equal_group:
        return "all samples of its prompt have the same reward, and ppo.dropEqualGroups is set"
    return ""
