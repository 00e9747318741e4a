"""Names that the rules for manifests and the processes share. Processes import those of processes and containers from
`dovetail.protocol.process.process_names`."""

from __future__ import annotations

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
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
DATA_SUFFIXES = JSON_LINES + PARQUET
