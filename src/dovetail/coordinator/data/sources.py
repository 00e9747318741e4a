"""Loads a `DataSource` into records with `datasets`. Tables are Arrow files, so they may be larger than the memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dovetail.coordinator.data import synthetic
from dovetail.coordinator.data.data_error import DataError, causes
from dovetail.coordinator.data.data_files import content_digest, rows, source_files
from dovetail.coordinator.data.formats import convert, detect, left_out
from dovetail.coordinator.data.records import ByIndex, Demonstration, Preference, Prompt, Record, Records
from dovetail.coordinator.data.text.chat_template import ChatFormat, HumanAssistant, WithSystem
from dovetail.coordinator.data.text.conversations import table_row
from dovetail.manifest.fixed_names import PARQUET, DataKind
from dovetail.manifest.types import DataSource, TemplateUse

# The version of the checks of rows of files. Increase it when the checks change, so that rows are checked again.
CHECKED = 8
NO_PAIRS = "no record has two completions with different scores, so there is no pair"


@dataclass(frozen=True)
class Rows:
    """The records of a table. Each is converted when it is requested. `fields` has every name that any prompt has in
    its `fields`. It is empty for other kinds of records."""

    table: Any
    row: Callable[[Any], dict[str, Any]]
    where: Callable[[int], str]
    format: str
    kind: DataKind
    chat: ChatFormat
    template: TemplateUse
    fields: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def files(self) -> list[tuple[str, int]]:
        """Path and size in bytes of each Arrow file of the table. The name of the file or of a folder of it contains a
        hash of what it is made from."""
        paths = [Path(file["filename"]) for file in self.table.cache_files]
        return [("/".join(path.parts[-4:]), path.stat().st_size) for path in paths]

    def __getitem__(self, index: int) -> Record:
        return convert(self.row(self.table[index]), self.format, self.kind, self.chat, self.where(index), self.template)


def identity(source: DataSource, kind: DataKind, position: int, base_dir: Path) -> str:
    """A value that is equal for two sources with the same records, which the stages must then share. Two synthetic
    sources are never equal, because each list and each entry has its own records."""
    if source.hugging_face:
        return json.dumps(["hub", source.hugging_face, source.subset, source.split])
    if source.path:
        return json.dumps(["path", str((base_dir / source.path).resolve())])
    return json.dumps(["synthetic", kind, position])


def load(
    source: DataSource,
    kind: DataKind,
    *,
    field: str,
    base_dir: Path,
    cache_dir: Path,
    seed: int,
    chat: ChatFormat | None = None,
) -> Records[Record]:
    """Records of `kind` from the source, in the source's own order.

    `field` is the manifest field, for errors. Relative paths start from `base_dir`. Arrow files are written to
    `cache_dir`. Every row of a text file is checked here. In Parquet and on a hub, only the first record is checked
    here, and each other record when it is read. Raises DataError."""
    chat = with_system(chat or HumanAssistant(), source)
    if source.synthetic is not None:
        return _synthetic(kind, source.synthetic.size, seed, field)
    if source.path is not None:
        return _path(source, base_dir / source.path, kind, field, cache_dir, chat)
    if source.hugging_face is not None:
        return _hub(source, kind, field, cache_dir, chat)
    raise DataError(f"{field} needs one of huggingFace, path and synthetic")


def with_system(chat: ChatFormat, source: DataSource) -> ChatFormat:
    """The format in which the source's conversations are written."""
    return chat if source.system_prompt is None else WithSystem(chat, source.system_prompt)


def _synthetic(kind: DataKind, size: int, seed: int, field: str) -> Records[Record]:
    key = f"{seed}/{field}"

    def demonstration(i: int) -> Record:
        return Demonstration.of(*synthetic.demonstration(i, key))

    def preference(i: int) -> Record:
        pair = synthetic.preference(i, key)
        return Preference(pair.prompt, pair.chosen, pair.rejected)

    def prompt(i: int) -> Record:
        return Prompt(synthetic.prompt(i, key))

    make = {"demonstrations": demonstration, "preferences": preference, "prompts": prompt}
    return ByIndex(size, make[kind])


def _path(
    source: DataSource, path: Path, kind: DataKind, field: str, cache_dir: Path, chat: ChatFormat
) -> Records[Record]:
    files = source_files(path, field)
    if files[0].name.endswith(PARQUET):
        return _parquet(source, files, kind, cache_dir, chat)
    import datasets

    fmt = source.format
    if fmt == "Auto":
        _, first, row = next(_good(files[:1]))
        fmt = detect(row, first, kind)  # type: ignore[assignment]

    def checked() -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        empty = True
        for file, place, row in _good(files):
            if left_out(row, fmt, kind, place):
                continue
            empty = False
            record = convert(row, fmt, kind, chat, place, source.template)
            new = record.fields.keys() - seen if isinstance(record, Prompt) else set()
            seen |= new
            # Names that no earlier row had, so that all names can be found without reading each row again.
            names = json.dumps(sorted(new)) if new else ""
            at = place.removeprefix(str(files[file]))
            yield {"file": file, "at": at, "json": json.dumps(row), "fields": names}
        if empty:
            raise DataError(f"{path}: {NO_PAIRS}")

    # With this stamp, a later start reuses the Arrow file of unchanged rows that were checked before.
    stamp = json.dumps([[str(f), content_digest(f)] for f in files] + [fmt, kind, source.template, CHECKED])
    columns = {"file": "int32", "at": "string", "json": "large_string", "fields": "string"}
    features = datasets.Features({name: datasets.Value(dtype) for name, dtype in columns.items()})
    with _quiet():
        table = _raising(
            lambda: datasets.Dataset.from_generator(
                checked,
                features=features,
                cache_dir=str(cache_dir),
                fingerprint=hashlib.sha256(stamp.encode()).hexdigest()[:32],
            ),
            f"{field}.path: {path}",
        )

    def where(index: int) -> str:
        row = table[index]
        return f"{files[row['file']]}{row['at']}"

    names = frozenset(name for new in table.unique("fields") if new for name in json.loads(new))
    return Rows(
        table, lambda row: cast(dict[str, Any], json.loads(row["json"])), where, fmt, kind, chat, source.template, names
    )


def _good(files: Sequence[Path]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The (position of the file, place, row) of each row. Raises DataError for the first that is bad."""
    for i, file in enumerate(files):
        for place, row in rows(file):
            if isinstance(row, DataError):
                raise row
            yield i, place, row


def _parquet(
    source: DataSource, files: list[Path], kind: DataKind, cache_dir: Path, chat: ChatFormat
) -> Records[Record]:
    import datasets

    # The cache of `datasets` takes a file of the same time for the same file.
    cache_dir /= hashlib.sha256("".join(map(content_digest, files)).encode()).hexdigest()[:32]
    with _quiet():
        table = _raising(
            lambda: datasets.load_dataset(
                "parquet", data_files=[str(f) for f in files], split="train", cache_dir=str(cache_dir)
            ),
            str(files[0]) if len(files) == 1 else str(files[0].parent),
        )
    return _table(table, source, str(files[0]), kind, chat)


def hub_table(source: DataSource, field: str, cache_dir: Path | None = None) -> Any:
    """The table of a hub data set. If `cache_dir` is None, the cache of `datasets` is used. Raises DataError."""
    import datasets

    def load_dataset() -> Any:
        options = {"split": source.split, "cache_dir": cache_dir and str(cache_dir), "revision": source.revision}
        try:
            return datasets.load_dataset(source.hugging_face, source.subset, **options)
        except ValueError as error:
            # Anthropic/hh-rlhf and others have their parts in folders and not in named configurations.
            if source.subset is None or "BuilderConfig" not in str(error):
                raise
            return datasets.load_dataset(source.hugging_face, data_dir=source.subset, **options)

    with _quiet():
        return _raising(load_dataset, f"{field}.huggingFace: {source.hugging_face}")


def _hub(source: DataSource, kind: DataKind, field: str, cache_dir: Path, chat: ChatFormat) -> Records[Record]:
    table = hub_table(source, field, cache_dir)
    return _table(table, source, f"{source.hugging_face} ({source.split})", kind, chat)


def _table(table: Any, source: DataSource, name: str, kind: DataKind, chat: ChatFormat) -> Records[Record]:
    if not len(table):
        raise DataError(f"{name}: the data set is empty")
    fmt = detect(table[0], f"{name}: record 1", kind) if source.format == "Auto" else source.format
    kept: Sequence[int] = range(len(table))
    if "completions" in table.column_names and kind == "preferences":
        # Only a table of this format may have rows without a pair. Others are not read here.
        kept = [i for i in kept if not left_out(table_row(table[i]), fmt, kind, f"{name}: record {i + 1}")]
        table = table.select(kept)
    if not kept:
        raise DataError(f"{name}: {NO_PAIRS}")
    rows = Rows(table, table_row, lambda i: f"{name}: record {kept[i] + 1}", fmt, kind, chat, source.template)
    first = rows[0]
    # All rows of a table have the same columns.
    return replace(rows, fields=frozenset(first.fields)) if isinstance(first, Prompt) else rows


def _raising(action: Callable[[], Any], what: str) -> Any:
    """Run `action`, and turn the loader's errors into a DataError of one sentence. A DataError is raised unchanged."""
    try:
        return action()
    except Exception as error:  # `datasets` raises many kinds of errors, all about the user's source
        for cause in causes(error):
            if isinstance(cause, DataError):
                raise cause from None
            if isinstance(cause, OSError) and cause.errno == 28:
                raise
        message = " ".join(str(error).split())[:300]
        raise DataError(f"{what}: cannot be loaded: {message or type(error).__name__}") from error


class _quiet:  # noqa: N801 - reads as a statement
    """Turn off the loader's progress bars, because they would break the caller's own."""

    def __enter__(self) -> None:
        import datasets

        self._shown = datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        import datasets

        if self._shown:
            datasets.enable_progress_bars()
