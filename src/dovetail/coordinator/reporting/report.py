"""Makes report.html, which is the run page in one file, with its data. It loads nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.coordinator.reporting.bill import Bill
from dovetail.coordinator.reporting.page.overview import last_of_each_step
from dovetail.coordinator.reporting.page.page_documents import PageDocuments, encode
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.run_summary import read_summary
from dovetail.coordinator.reporting.sample_files import Row, best_and_worst
from dovetail.protocol.errors import RunError
from dovetail.protocol.files.durable import write_whole
from dovetail.protocol.wire import Arrays
from dovetail.web.page_files import frozen_page

# The maximum number of bytes of data in a report, and in that of a run whose disk is full.
MOST_BYTES, LEAST_BYTES = 4 << 20, 256 << 10
# The number of samples of an iteration that can be read whole.
WHOLE_SAMPLES = 24

# What the overview lists, the question for it, and how one says that only a part of it is there.
_KEPT = {
    "trace_iterations": ("timeline", "the timelines of {} of {} iterations"),
    "sample_iterations": ("samples", "the samples of {} of {} iterations"),
    "evaluations": ("evaluation", "{} of {} evaluations"),
}


class _Ended(RunFolder):
    """The folder of a run that writes no more. The samples and the batch of an iteration are read once, as long as no
    other iteration is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._samples, self._batch = lru_cache(1)(super().samples), lru_cache(1)(super().batch)

    def samples(self, iteration: int) -> list[Row]:
        return self._samples(iteration)

    def batch(self, iteration: int) -> Arrays:
        return self._batch(iteration)


class _Answers:
    """The run's answers to the page's questions, as long as there is room for them."""

    def __init__(self, run: PageDocuments, room: int) -> None:
        self.found: dict[str, Any] = {}
        self.run, self.room, self.now = run, room, time.time()
        self.full = False  # whether the last answer did not fit

    def put(self, question: str, answer: bytes) -> bool:
        size = _size(answer)
        self.full = size > self.room
        if self.full:
            return False
        self.room -= size
        self.found[question] = json.loads(answer)
        return True

    def ask(self, question: str) -> bool:
        """Whether the report has this answer."""
        if question in self.found:
            return True
        try:
            return self.put(question, self.run.answer(question, self.now, alive=False))
        except Exception:  # it is not kept, or a damaged file, which must not keep the rest back
            return False


def _size(answer: bytes) -> int:
    """The bytes of an answer in the page, where each `<` is written as six characters."""
    return len(answer) + 5 * answer.count(b"<")


def _ends(numbers: Sequence[int]) -> list[int]:
    """The last number, then the first."""
    return list(dict.fromkeys([*numbers[-1:], *numbers[:1]]))


def _thinned(rows: Sequence[dict[str, Any]], room: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of history.jsonl that fit into `room` bytes, and n if every n-th step of a stage is among them."""
    stages = dict.fromkeys(str(row["stage"]) for row in rows)
    found, most = [], 1
    for stage in stages:
        steps = last_of_each_step(rows, stage)
        every = -(-len(encode(list(steps.values()))) * len(stages) // max(1, room))
        # The last step counts most.
        found += [steps[step] for step in reversed(sorted(steps, reverse=True)[::every])]
        most = max(most, every)
    return found, most


def report_data(run: PageDocuments, most: int) -> bytes:
    """What the page asks for, with what is most looked at first: at most `most` bytes, or those of the overview."""
    asked, folder = _Answers(run, most), run.folder
    answer = run.answer("overview", asked.now, alive=False)
    overview = json.loads(answer)
    asked.room -= _size(answer)
    rows, every = _thinned(folder.rows(), most // 2)
    asked.put("history/0", encode({"rows": rows, "next": len(rows), "more": False}))
    traces, samples, evaluations = (list(overview[name]) for name in _KEPT)
    # The answers at the end, at the beginning and before the first iteration stand side by side.
    for number in dict.fromkeys([*_ends(evaluations), *(number for number in evaluations if number <= 0)]):
        asked.ask(f"evaluation/{number}")
    listed = [iteration for iteration in _ends(samples) if asked.ask(f"samples/{iteration}")]
    asked.ask("events")
    asked.ask("bill")
    # The last iteration also has the final checkpoint, so the one before it is there too.
    for iteration in reversed(traces[-2:]):
        asked.ask(f"timeline/{iteration}")
        asked.ask(f"schedule/{iteration}")
    if not traces:
        asked.ask("schedule/0")
    left = asked.room // 2  # whole samples of long responses would fill all
    for iteration in listed:
        kept = folder.samples(iteration)
        for row in [*(row for _, row in best_and_worst(kept)), *kept[:WHOLE_SAMPLES]]:
            if asked.room > left:
                asked.ask(f"sample/{iteration}/{row.get('prompt_index', 0)}/{row.get('sample_index', 0)}")
    for kind, numbers in (("evaluation", evaluations), ("samples", samples), ("timeline", traces)):
        for number in reversed(numbers):
            asked.ask(f"{kind}/{number}")
            if asked.full:
                break
    parts = [f"every {every}th step"] if every > 1 else []
    for name, (kind, words) in _KEPT.items():
        numbers = [number for number in overview[name] if f"{kind}/{number}" in asked.found]
        if len(numbers) < len(overview[name]):
            parts.append(words.format(len(numbers), len(overview[name])))
        overview[name] = numbers
    if whole := sum(question.startswith("sample/") for question in asked.found):
        parts.append(f"the whole conversation of {whole} samples")
    about = {
        "source": "file",
        "run": overview["id"],
        "written": asked.now,
        "left_out": f"This file has {', '.join(parts)}. dovetail ui shows all." if parts else "",
    }
    return encode({"about": about, "answers": asked.found | {"overview": overview}})


def write_report(run_dir: Path, bill: Bill | None = None) -> Path:
    """Write report.html into a run directory, atomically. `bill` is that of `PageDocuments`. Raises RunError if there
    is no summary.json."""
    read_summary(run_dir)
    run, path = PageDocuments(_Ended(run_dir.resolve()), bill), run_dir / "report.html"
    try:
        try:
            write_whole(path, frozen_page(report_data(run, MOST_BYTES)))
        except OSError:  # the disk may have room for less
            write_whole(path, frozen_page(report_data(run, LEAST_BYTES)))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    return path
