"""Names that the rules for manifests and the processes share. Processes import those of processes and containers from
`dovetail.protocol.process.process_names`."""

from __future__ import annotations

from typing import Literal, get_args

# The coordinator's process and its part of pod names.
COORDINATOR = "coordinator"
# The container of every pod, which a group's podTemplate patches.
CONTAINER = "dovetail"
# Where Kubernetes reads a container's last words. It is a file only in pods.
TERMINATION_LOG = "/dev/termination-log"
# The fields of spec.data that list sources, and what the records of each are.
DataKind = Literal["demonstrations", "preferences", "prompts"]
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)
# The fields of spec.models that name a model.
MODEL_NAMES = ("actor", "critic", "reward", "reference")
# How the names of data files end.
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
DATA_SUFFIXES = JSON_LINES + PARQUET
