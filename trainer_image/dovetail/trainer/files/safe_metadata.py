"""Reads checkpoints without running code from them.

DCP keeps the list of a checkpoint's tensors as a pickle, `.metadata`. Unpickling runs whatever the file names. Here it
may name only DCP's own records. Records of pickled objects (`BytesStorageMetadata`) are not allowed, because DCP would
unpickle those too, and our checkpoints hold only tensors. Tensors themselves are read with `weights_only=True`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from dovetail.trainer.compat import metadata_path

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.serialization": {"_get_layout"},
}
_PATHS = {
    "Path",
    "PosixPath",
    "PurePath",
    "PurePosixPath",
}  # of the folder when it was saved; in Python 3.13 from pathlib._local


class UnsafeCheckpoint(RuntimeError):
    """`.metadata` names something that DCP never writes, or cannot be read. The message is one sentence."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        raise UnsafeCheckpoint(f".metadata names {module}.{name}, which is no part of a checkpoint; it was not run")


class SafeReader(FileSystemReader):
    """DCP's reader with a safe way to read `.metadata`. Raises `UnsafeCheckpoint`, and OSError for a missing file.

    `problem` is the first `UnsafeCheckpoint`. It is kept here because DCP of torch 2.11 drops it and only says that
    there is no metadata."""

    problem: UnsafeCheckpoint | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._read(metadata_path(self, kwargs.get("rank")))
        except UnsafeCheckpoint as error:
            self.problem = self.problem or error
            raise

    def _read(self, path: Path) -> Metadata:
        with path.open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except UnsafeCheckpoint:
                raise
            except Exception as error:  # a damaged pickle can raise anything
                raise UnsafeCheckpoint(f".metadata cannot be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise UnsafeCheckpoint(".metadata is no list of tensors")
        for name in _files(metadata):
            # DCP would follow a path to any file on the machine.
            if not isinstance(name, str) or PurePath(name).name != name:
                raise UnsafeCheckpoint(f".metadata says that tensors are in {name!r}, outside of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _files(metadata: Metadata) -> Iterator[Any]:
    for info in cast("dict[Any, Any]", metadata.storage_data or {}).values():
        yield getattr(info, "relative_path", None)
