"""Describes field types, as in "a number above 0", for messages, `dovetail explain` and the reference page."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest import base

_PATTERNS = {
    base.NAME_PATTERN: "lower-case letters, digits and dashes, starting and ending with a letter or digit",
    base.OBJECT_NAME_PATTERN: "lower-case letters, digits, dashes and dots, starting and ending with a letter or digit",
    base.BUCKET_PATTERN: "lower-case letters, digits, dashes, dots and underscores, starting and ending with a letter "
    "or digit",
    base.KEY_PATTERN: "letters, digits, dashes, dots and underscores",
    base.FOLDER_PATTERN: "letters, digits, dashes, dots and underscores, starting with a letter or digit",
    base.WORD_PATTERN: "letters, digits and underscores, not starting with a digit",
    base.CONTROLLER_PATTERN: "a name with its domain, such as example.com/controller",
    base.FIELD_PATTERN: "a field of a job, such as spec.ppo.kl",
    base.URL_PATTERN: "a URL that begins with http:// or https://",
    base.SERVER_PATTERN: "the URL of a server, such as https://example.com:9000",
    base.PREFIX_PATTERN: "text without spaces that does not begin with /",
    base.CALLABLE_PATTERN: "a Python function as module:callable",
    base.LOSS_PATTERN: f"{', '.join(base.LOSSES)} or a Python function as module:callable",
    base.METRIC_PATTERN: f"{', '.join(base.METRICS)} or a Python function as module:callable",
}


def is_model(kind: Any) -> bool:
    """Whether a type is an API object."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def model_in(kind: Any) -> type[BaseModel] | None:
    """The API object that a type is, holds in a list or offers in a union."""
    if is_model(kind):
        return kind  # type: ignore[no-any-return]
    for part in get_args(kind):
        if found := model_in(part):
            return found
    return None


def fields_below(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The path and the field of everything below an API object, such as `groups[].gpu.perPod`. Nearer ones come
    first."""
    inner = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path, field
        if below := model_in(field.annotation):
            inner.append((below, f"{path}[]." if _short(field.annotation).startswith("[]") else f"{path}."))
    for below, path in inner:
        yield from fields_below(below, path)


# The ends of our paths, by the names that other tools give to these fields, without _ and -.
_OTHER_NAMES = {
    **dict.fromkeys(("lr", "learningrate", "optimizer.learningrate"), "learningRate"),
    **dict.fromkeys(("count", "gpus", "numgpus", "ngpus", "nprocpernode"), "perPod"),
    **dict.fromkeys(("numgenerations", "groupsize", "numsamples", "n"), "samplesPerPrompt"),
    **dict.fromkeys(("maxnewtokens", "maxcompletionlength", "maxresponselength", "responselength"), "maxTokens"),
    **dict.fromkeys(("steps", "maxsteps", "totalsteps", "trainingsteps"), "iterations"),
    **dict.fromkeys(("numtrainepochs", "numepochs", "totalepochs"), "epochs"),
    **dict.fromkeys(("batchsize", "trainbatchsize", "rolloutbatchsize"), "globalBatchSize"),
    **dict.fromkeys(("ppominibatchsize", "minibatch"), "miniBatchSize"),
    **dict.fromkeys(("perdevicetrainbatchsize", "microbatch"), "microBatchSize"),
    **dict.fromkeys(("cliprange", "clipratio", "clipeps", "epsilon"), "clip"),
    **dict.fromkeys(("klcoef", "initklcoef", "klcoefficient", "beta"), "kl.coef"),
    **dict.fromkeys(("optimizer",), "actorOptimizer"),
    **dict.fromkeys(("lorar", "lorarank"), "lora.rank"),
    **dict.fromkeys(("maxpromptlength",), "maxPromptTokens"),
    **dict.fromkeys(("model", "modelname", "modelnameorpath"), "models.actor.source"),
    **dict.fromkeys(("dataset", "datasets", "trainfiles"), "data"),
    **dict.fromkeys(("rewardfn", "rewardfunc", "rewardfuncs", "rewardfunction"), "models.reward.function"),
    **dict.fromkeys(("outputdir",), "output.path"),
    **dict.fromkeys(("savesteps",), "checkpoint.everySteps"),
    **dict.fromkeys(("evalsteps", "evalinterval"), "evaluation.everyIterations"),
    **dict.fromkeys(("reportto", "wandb", "logger"), "trackers"),
}


def named(model: type[BaseModel], name: str) -> list[str]:
    """The paths below an API object whose last name is `name`, or what other tools call so."""
    plain = re.sub("[_-]", "", name).lower()
    paths = [path for path, _ in fields_below(model)]
    for wanted in (plain, _OTHER_NAMES.get(plain, "").lower()):
        if wanted and (found := [path for path in paths if f".{path}".lower().endswith(f".{wanted}")]):
            return found
    return []


def options(kind: Any) -> list[str]:
    """The values of an enumeration or literal, also inside a list or a union. [] for other types."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [member.value for member in kind]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for part in get_args(kind) for value in options(part)]


def short_type(field: FieldInfo) -> str:
    """The type as kubectl explain writes it: string, integer, number, boolean, Object, []string, map[string]string."""
    return _short(field.annotation)


def _short(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _short(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_short(part) for part in args if part is not type(None)))
    if origin is list:
        return f"[]{_short(args[0])}"
    if origin is dict:
        return f"map[string]{'any' if args[1] is Any else _short(args[1])}"
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        return "string"
    if is_model(kind):
        return str(kind.__name__)
    return {bool: "boolean", int: "integer", float: "number", str: "string", datetime: "date-time"}.get(kind, "any")


def expected(field: FieldInfo) -> str:
    """What a field accepts. It completes the sentence `x must be ...`."""
    return describe(field.annotation, list(field.metadata))


def describe(kind: Any, metadata: list[Any]) -> str:
    """What a value of type `kind` with these constraints is, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return describe(args[0], metadata + _flat(args[1:]))
    if origin in (Union, types.UnionType):
        parts = [describe(part, metadata) for part in args if part is not type(None)]
        return " or ".join(parts) + (" (or null)" if type(None) in args else "")
    if values := options(kind) if origin is not list else []:
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin is list:
        return _list(args[0], metadata)
    if origin is dict or is_model(kind):
        return "a mapping (indented `key: value` lines)"
    if kind is bool:
        return "true or false"
    if kind is int:
        return f"a whole number{_range(metadata)}"
    if kind is float:
        return f"a number{_range(metadata)}"
    return _text(metadata)


def _list(kind: Any, metadata: list[Any]) -> str:
    size = _size(metadata, "item")
    values = options(kind)
    of = f", each one of {', '.join(values)}" if values else ""
    return f"a list{size}{of}"


def _text(metadata: list[Any]) -> str:
    for item in metadata:
        pattern = getattr(item, "pattern", None)
        if pattern in _PATTERNS:
            sizes = [m for m in metadata if isinstance(m, MaxLen) or (isinstance(m, MinLen) and m.min_length > 1)]
            return _PATTERNS[pattern] + _size(sizes, "character")
    return "text" + _size(metadata, "character")


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def _range(metadata: list[Any]) -> str:
    low = next((f"of at least {_number(m.ge)}" for m in metadata if isinstance(m, Ge)), None)
    low = low or next((f"above {_number(m.gt)}" for m in metadata if isinstance(m, Gt)), None)
    high = next((f"at most {_number(m.le)}" for m in metadata if isinstance(m, Le)), None)
    high = high or next((f"below {_number(m.lt)}" for m in metadata if isinstance(m, Lt)), None)
    return "".join(f" {part}" for part in (low, "and" if low and high else None, high) if part)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(metadata: list[Any], unit: str) -> str:
    low = next((m.min_length for m in metadata if isinstance(m, MinLen) and m.min_length), None)
    high = next((m.max_length for m in metadata if isinstance(m, MaxLen)), None)
    if low and high:
        return f" of {low} to {high} {unit}s"
    if low:
        return f" of at least {low} {unit}{'s' if low > 1 else ''}"
    return f" of at most {high} {unit}s" if high else ""
