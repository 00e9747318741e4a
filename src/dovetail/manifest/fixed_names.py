"""Names that the rules for manifests and the processes share. Processes import those of processes and containers from
`dovetail.protocol.process.process_names`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

# The coordinator's process and its part of pod names.
COORDINATOR = "coordinator"
# The container of every pod, which a group's podTemplate patches.
CONTAINER = "dovetail"
# Kubernetes reads a container's termination message from this file. It exists only in pods.
TERMINATION_LOG = "/dev/termination-log"
# The fields of spec.data that list sources. They also name the kinds of records.
DataKind = Literal["demonstrations", "preferences", "prompts"]
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)
# The fields of spec.models that name a model.
MODEL_NAMES = ("actor", "critic", "reward", "reference")
# The endings of the names of data files.
_JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET = (".parquet",)
DATA_SUFFIXES = _JSON_LINES + JSON + CSV + PARQUET
DATA_ENDINGS = ".jsonl, .json, .csv or .tsv (or one of these and .gz) or .parquet"


def data_files(path: Path) -> list[Path]:
    """The data files of a file or folder, in order. A JSON file beside files of other kinds describes these, as a data
    set's own `dataset_info.json`, so it is left out."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.name.endswith(DATA_SUFFIXES) and (file == path or file.is_file())]
    return [file for file in files if not file.name.endswith(JSON)] or files
