"""Checks what is in a model's folder: its configuration, whether its weights are whole, and whether there is a
tokenizer. It reads names, sizes and the headers of weights, and needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.manifest.model_families.support import problem, text_part

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# The files of a tokenizer. One of them is enough.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
_MOST_HEADER = 100_000_000  # bytes, as in the library safetensors
_POINTER = b"version https://git-lfs"
Header = dict[str, Any]


class BrokenWeights(ValueError):
    """A file of weights is not whole. The message is a clause that begins with its name."""


def folder_problems(folder: Path) -> Iterator[str]:
    """Why the folder is no model that can be trained, as sentences without a full stop."""
    config = folder / "config.json"
    if not config.is_file():
        if (folder / "adapter_config.json").is_file():
            yield _adapter(folder)
            return
        yield f"{folder} is no Hugging Face model folder: config.json is missing"
    elif isinstance(read := read_json(config), str):
        yield f"{config} cannot be read: {read}"
    elif not isinstance(read, dict) or "model_type" not in read:
        yield f"{config} names no model_type; it is not a model's configuration"
    elif (why := problem(read)) is not None:
        yield f"{folder}: {why}"
    try:
        if not headers(folder):
            yield _no_weights(folder)
    except BrokenWeights as error:
        yield f"{folder}: {error}"


def model_config(folder: Path) -> Any:
    """config.json of the language model in the folder, or a string with the reason if it cannot be read."""
    read = read_json(folder / "config.json")
    return text_part(read) if isinstance(read, dict) else read


def _adapter(folder: Path) -> str:
    base = read_json(folder / "adapter_config.json")
    name = base.get("base_model_name_or_path") if isinstance(base, dict) else None
    of = f" of {name}" if isinstance(name, str) and name else ""
    return (
        f"{folder} holds an adapter{of} and no model; merge it into its base model (merge_and_unload of peft) and save "
        "the result"
    )


def _no_weights(folder: Path) -> str:
    if any(file.name.endswith(PICKLES) for file in folder.iterdir()):
        return (
            f"{folder} holds only pickled weights, which could run code when loaded; convert them with "
            "`model.save_pretrained(folder, safe_serialization=True)`"
        )
    if (folder / "adapter_model.safetensors").is_file():
        return _adapter(folder)
    return f"{folder} holds no weights; a *.safetensors file is needed"


def weight_files(names: list[str], index: Any) -> list[str]:
    """The files with a model's weights, of all that there are. `index` is the content of INDEX. Some folders have the
    same weights again in another format."""
    here = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    here = [name for name in here if name != "adapter_model.safetensors"]
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        return sorted({str(name) for name in index["weight_map"].values()})
    return ["model.safetensors"] if "model.safetensors" in here else here


def headers(folder: Path) -> dict[str, Header]:
    """The headers of a folder's weights, by file: shape, dtype and byte offsets of each tensor, by name. {} if there
    are no weights. Raises BrokenWeights."""
    index = read_json(folder / INDEX) if (folder / INDEX).is_file() else None
    if index is not None and (not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict)):
        raise BrokenWeights(f"{INDEX} cannot be read: it holds no weight_map")
    found = {}
    for name in weight_files([path.name for path in folder.iterdir()], index):
        if not (folder / name).is_file():
            raise BrokenWeights(f"{name} is missing, which {INDEX} names; copy the whole model")
        found[name] = _header(folder / name)
    if index is not None:
        lacks = next((key for key, name in index["weight_map"].items() if key not in found[str(name)]), None)
        if lacks is not None:
            raise BrokenWeights(
                f"{index['weight_map'][lacks]} lacks {lacks}, which {INDEX} names; copy the whole model"
            )
    return found


def _header(file: Path) -> Header:
    again = "copy it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(_POINTER))
            length = int.from_bytes(start[:8], "little")
            opened.seek(8)
            text = opened.read(min(length, _MOST_HEADER))
    except OSError as error:
        raise BrokenWeights(f"{file.name} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if start == _POINTER:
        raise BrokenWeights(f"{file.name} is a pointer of Git LFS and not the weights; run `git lfs pull`")
    if not size:
        raise BrokenWeights(f"{file.name} is empty; {again}")
    if length > _MOST_HEADER:
        raise BrokenWeights(f"{file.name} is no safetensors file; {again}")
    if size < 8 + length:
        raise BrokenWeights(f"{file.name} is cut off in its header, after {size:,} bytes; {again}")
    try:
        header = json.loads(text)
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        end = 8 + length + max((value["data_offsets"][1] for value in tensors.values()), default=0)
        if not all(isinstance(side, int) for value in tensors.values() for side in value["shape"]):
            raise TypeError
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise BrokenWeights(f"{file.name} is no safetensors file: its header cannot be read; {again}") from None
    if size != end:
        raise BrokenWeights(f"{file.name} has {size:,} bytes, but its header names {end:,}; {again}")
    return tensors


def tokenizer_problem(folder: Path) -> str | None:
    """Why there is no tokenizer in the folder, as a sentence without a full stop. None if there may be one: files in
    Python of its own, which a manifest may trust, are not looked at."""
    config = folder / "tokenizer_config.json"
    read = read_json(config) if config.is_file() else {}
    if not isinstance(read, dict):
        return f"{config} cannot be read: {read if isinstance(read, str) else 'not a JSON object'}"
    files = [folder / name for name in _TOKENIZERS if (folder / name).is_file()]
    if not files and "auto_map" not in read and not any(folder.glob("*.tiktoken")):
        return f"{folder} holds no tokenizer: tokenizer.json is missing"
    for file in files:
        with file.open("rb") as opened:
            start = opened.read(len(_POINTER))
        if start == _POINTER:
            return f"{file} is a pointer of Git LFS and not the tokenizer; run `git lfs pull`"
        if not start:
            return f"{file} is empty; copy it again"
    if (folder / "tokenizer.json").is_file() and not isinstance(whole := read_json(folder / "tokenizer.json"), dict):
        return f"{folder / 'tokenizer.json'} cannot be read: {whole if isinstance(whole, str) else 'not a JSON object'}"
    return None


def read_json(path: Path) -> Any:
    """The file's value, or a string with the reason if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    return value if not isinstance(value, str) else "not a JSON object"
