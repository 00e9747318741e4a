"""Names that the rules for manifests and the processes share. Processes import those of processes and containers from
`dovetail.protocol.process.process_names`."""

from __future__ import annotations

# The coordinator's process and its part of pod names.
COORDINATOR = "coordinator"
# The container of every pod, which a group's podTemplate patches.
CONTAINER = "dovetail"
# How the names of data files end.
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
DATA_SUFFIXES = JSON_LINES + PARQUET
