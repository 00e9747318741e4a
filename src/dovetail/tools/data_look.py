"""Shows what is in a data file or in a data set of a hub: its format, its records as text, their lengths in tokens, and
its bad lines. It reads every record in the way in which a job reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.data_files import rows, source_files
from dovetail.coordinator.data.formats import (
    FORMATS,
    as_messages,
    convert,
    detect,
    has_template,
    is_dialogue,
    left_out,
    needed_fields,
    tools_in,
)
from dovetail.coordinator.data.records import Demonstration, Labelled, Preference, Record, equal_pairs
from dovetail.coordinator.data.sources import hub_table
from dovetail.coordinator.data.text.chat_template import ChatFormat, chat_format
from dovetail.coordinator.data.text.conversations import table_row
from dovetail.coordinator.data.text.tokenize import Encoder
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import DataSource, TemplateUse

# The number of records that are searched for fields that nothing reads.
SEARCHED = 32


@dataclass(frozen=True)
class PartLengths:
    """The token counts of one part of the records. `limit`: the maximum length in tokens. Longer ones are cut. `cut`:
    how many are cut."""

    part: str
    median: int
    p95: int
    longest: int
    limit: int
    cut: int


@dataclass(frozen=True)
class DataLook:
    """What was found. `files` is empty for a data set of a hub. `records`: the number of good records. `errors`: the
    number of bad lines. `first_error` names its file and line. `template`: how dialogues become text. `example`: the
    first good record. `lengths` is empty without a tokenizer. `tools`: the number of records that name tools. `equal`:
    the number of pairs with equal replies, perhaps because both are cut. `unused`: the fields that none of the first
    records needs. `empty`, `repeated`: a clause about records with an empty response, and about those that an earlier
    record equals, or ""."""

    files: Sequence[Path]
    format: str
    kind: DataKind
    records: int
    errors: int
    first_error: str | None
    template: str
    example: Record | None
    lengths: Sequence[PartLengths] = ()
    notes: Sequence[str] = ()
    tools: int = 0
    equal: int = 0
    unused: Sequence[str] = ()
    empty: str = ""
    repeated: str = ""


@dataclass
class _Places:
    """The number of records of one kind, and the place of the first."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        self.count += 1
        self.first = self.first or place

    def clause(self, one: str, many: str) -> str:
        """What the records are. "" if there are none."""
        text = f"1 record {one}" if self.count == 1 else f"{self.count:,} records {many}"
        return f"{text} (first: {self.first})" if self.count else ""


@dataclass
class _PartCounts:
    limit: int
    part: str
    lengths: list[int] = field(default_factory=list)

    def summary(self) -> PartLengths:
        found = np.array(self.lengths)
        median, p95 = (int(np.percentile(found, share)) for share in (50, 95))
        return PartLengths(self.part, median, p95, int(found.max()), self.limit, int((found > self.limit).sum()))


def look(
    path: Path,
    where: str,
    kind: DataKind | None = None,
    fmt: str = "Auto",
    encoder: Encoder | None = None,
    chat: ChatFormat | None = None,
    template: TemplateUse = "Auto",
) -> DataLook:
    """Read every record of a file or folder. `where`: the name of the data in errors about the whole. `kind`: the kind
    of the records. None: the kind that the first good record looks like. `encoder` counts tokens. `chat` writes
    dialogues. None: the encoder's tokenizer writes them. Raises DataError for a file that is missing, empty or of no
    known kind."""
    files = source_files(path, where)
    return _read(rows_of(files), _Reading(kind, fmt, _chat(chat, encoder), encoder, template)).look(files)


def look_at_hub(
    source: DataSource,
    where: str,
    kind: DataKind | None = None,
    encoder: Encoder | None = None,
    chat: ChatFormat | None = None,
    cache: Path | None = None,
) -> DataLook:
    """Does the same as `look` for a data set of a hub. `cache`: the folder for its files. None: the cache of
    `datasets`."""
    table = hub_table(source, where, cache)
    name = f"{source.hugging_face} ({source.split})"
    rows = ((f"{name}: record {number}", table_row(row)) for number, row in enumerate(table, 1))
    found = _read(rows, _Reading(kind, source.format, _chat(chat, encoder), encoder, source.template))
    if not found.records and not found.errors:
        raise DataError(f"{name}: the data set is empty")
    return found.look([])


def _chat(chat: ChatFormat | None, encoder: Encoder | None) -> ChatFormat:
    return chat or chat_format(None if encoder is None else encoder.tokenizer)


def _read(rows: Iterable[tuple[str, Any]], found: _Reading) -> _Reading:
    for place, row in rows:
        found.read(row, place)
    return found


class _Reading:
    """Reads rows one by one and keeps the facts about them."""

    def __init__(
        self, kind: DataKind | None, fmt: str, chat: ChatFormat, encoder: Encoder | None, template: TemplateUse
    ) -> None:
        self.kind, self.format, self.chat, self._encoder, self._template = kind, fmt, chat, encoder, template
        self.records = self.errors = 0
        self.first_error: str | None = None
        self._example: Record | None = None
        added = getattr(encoder.tokenizer, "added_tokens_decoder", {}) if encoder is not None else {}
        self._special = [str(token) for token in added.values()]
        self._turns = False
        self._tools = self._equal = self._left_out = 0
        self._empty, self._repeated = _Places(), _Places()
        # A hash of each record.
        self._seen: set[bytes] = set()
        # For the name of each field in the first records: whether a record needed it.
        self._needed: dict[str, bool] = {}
        self._counts: dict[str, _PartCounts] = {}

    def read(self, row: Any, where: str) -> None:
        """Read one row. `row`: the row, or the error that it caused."""
        try:
            if isinstance(row, DataError):
                raise row
            record = self._converted(row, where)
            if record is None:
                self._left_out += 1
            else:
                self._keep(record, where)
        except DataError as error:
            self.errors += 1
            self.first_error = self.first_error or str(error)

    def _converted(self, row: Any, where: str) -> Record | None:
        """The record in a row. None if a job leaves the row out."""
        if self.format == "Auto":
            self.format = detect(row, where, self.kind)
        dialogue = is_dialogue(as_messages(row, self.format, self.chat, where, self._template))
        self._turns = self._turns or dialogue
        if self.kind is None:
            self.kind = kind_of(row, self.format, self.chat, where, self._template)
        if left_out(row, self.format, self.kind, where):
            return None
        record = convert(row, self.format, self.kind, self.chat, where, self._template)
        self._tools += dialogue and bool(tools_in(row, where))
        if self.records < SEARCHED:
            for name, needed in needed_fields(row, self.format, self.kind, self.chat, where, self._template).items():
                self._needed[name] = self._needed.get(name, False) or needed
        return record

    def _keep(self, record: Record, where: str) -> None:
        self.records += 1
        digest = hashlib.blake2b(repr(record).encode(errors="replace"), digest_size=8).digest()
        if digest in self._seen:
            self._repeated.add(where)
        self._seen.add(digest)
        if not all(self._without_special(text).strip() for text in _responses(record)):
            self._empty.add(where)
        self._example = self._example or record
        cut = 0
        if self._encoder is not None:
            for part, tokens, limit in _parts(record, self._encoder):
                self._counts.setdefault(part, _PartCounts(limit, part)).lengths.append(tokens)
                cut += part != "prompt" and tokens > limit
        if isinstance(record, Preference):
            # If both replies are cut, what is left of them may be equal.
            same = cut == 2 and self._encoder is not None and self._encoder.equal(record)
            self._equal += same or record.chosen == record.rejected

    def _without_special(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        return text

    def look(self, files: Sequence[Path]) -> DataLook:
        lengths = [counts.summary() for counts in self._counts.values()]
        own = has_template(self.chat)
        template = "none: the text is used as it is"
        if self._turns:
            template = "the tokenizer's chat template" if own else "Human/Assistant"
        notes = []
        empty = self._empty.clause("has an empty response", "have an empty response")
        repeated = self._repeated.clause("repeats an earlier one", "repeat an earlier one")
        notes += [f"{clause}." for clause in (empty, repeated) if clause]
        if self._left_out:
            notes.append(f"{self._left_out:,} records are left out, because their completions have equal scores.")
        if self._equal:
            notes.append(equal_pairs(self._equal, f"the {self.records:,} pairs") + ".")
        if own and not self._turns and self.records:
            notes.append(
                "The tokenizer has a chat template, but it is not used: "
                + ("the template of the source is Never." if self._template == "Never" else "these records are texts.")
            )
        if self._turns and not own:
            notes.append(
                "Dialogues are written as Human/Assistant; give --model NAME if the model has a template of its own."
                if self._encoder is None
                else "The tokenizer has no chat template, so dialogues are written as Human/Assistant."
            )
        if self._tools and not self.chat.shows_tools:
            have = "record has" if self._tools == 1 else "records have"
            notes.append(
                f"{self._tools:,} {have} tools, but the template shows none of them: the model will not know them."
            )
        return DataLook(
            files,
            self.format,
            self.kind or "prompts",
            self.records,
            self.errors,
            self.first_error,
            template,
            self._example,
            lengths,
            notes,
            self._tools,
            self._equal,
            [name for name, needed in self._needed.items() if not needed],
            empty,
            repeated,
        )


def _responses(record: Record) -> Iterator[str]:
    """The texts of a record that are learnt or compared."""
    if isinstance(record, Preference):
        yield from (record.chosen, record.rejected)
    elif isinstance(record, Demonstration):
        yield from (text for text, learnt in record.parts() if learnt)
    elif isinstance(record, Labelled):
        yield record.response


def kind_of(row: Any, fmt: str, chat: ChatFormat, where: str, template: TemplateUse) -> DataKind:
    """The kind that a record looks like: preferences, demonstrations, or else prompts. Raises DataError if it is none
    of them."""
    if FORMATS[fmt].judged:
        return "preferences"
    try:
        convert(row, fmt, "demonstrations", chat, where, template)
    except DataError:
        convert(row, fmt, "prompts", chat, where, template)
        return "prompts"
    return "demonstrations"


def rows_of(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yields the place of each row, and the row or a DataError. If a whole file cannot be read, it goes on with the
    next one."""
    for file in files:
        try:
            yield from rows(file)
        except DataError as error:
            yield str(file), error


def _parts(record: Record, encoder: Encoder) -> Iterator[tuple[str, int, int]]:
    """Yields (name, tokens, limit) for each part of a record that has a limit. `tokens` counts before the part is
    cut."""
    wholes: dict[str, Demonstration] = {}
    if isinstance(record, Demonstration):
        wholes["the whole conversation" if len(record.learnt) > 1 else "prompt and response"] = record
    elif isinstance(record, Labelled):
        wholes["prompt and response"] = Demonstration.of(record.prompt, record.response)
    elif isinstance(record, Preference):
        wholes["prompt and chosen"] = Demonstration.of(record.prompt, record.chosen)
        wholes["prompt and rejected"] = Demonstration.of(record.prompt, record.rejected)
    found = {name: encoder.whole(each) for name, each in wholes.items()}
    prompts = [learnt[0][0] for _, learnt in found.values()]
    yield "prompt", max(prompts, default=0) or len(encoder.encode(record.prompt)), encoder.max_prompt_tokens
    for name, (ids, _) in found.items():
        yield name, len(ids), encoder.max_tokens
