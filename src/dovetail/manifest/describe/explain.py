"""Describes a field for `dovetail explain`, in the form of kubectl explain."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dovetail.manifest.type_descriptions import expected, fields_below, model_in, named, options, short_type
from dovetail.manifest.types import API_VERSION, KIND, RLHFJob

_WIDTH = 100


class ExplainError(ValueError):
    """There is no such field. The message names similar ones."""


def alias(name: str, field: FieldInfo) -> str:
    """The field's name in a manifest."""
    return field.alias or name


def explain(path: str = KIND) -> str:
    """The page of a field such as `RLHFJob.spec.ppo`. The kind at its beginning may be left out. Raises
    ExplainError."""
    steps = [step for step in re.sub(r"\[\d*\]", "", path.strip()).split(".") if step]
    if steps and steps[0].lower() in (KIND.lower(), "rlhfjobs", "rlhf"):
        steps = steps[1:]
    elif steps and steps[0] not in dict(fields_below(RLHFJob)) and (len(steps) == 1 or named(RLHFJob, ".".join(steps))):
        return _search(".".join(steps))
    model: type[BaseModel] | None = RLHFJob
    field: FieldInfo | None = None
    done = KIND
    for step in steps:
        fields = {alias(n, f): f for n, f in model.model_fields.items()} if model else {}
        if step not in fields:
            raise ExplainError(_unknown(step, done, list(fields)))
        field = fields[step]
        model = model_in(field.annotation)
        done = f"{done}.{step}"
    return _page(done, field, model)


def default_of(field: FieldInfo) -> str | None:
    """The default as text similar to YAML. None for required fields, objects and empty lists."""
    if field.is_required():
        return None
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None or isinstance(value, BaseModel) or value in ([], {}):
        return None
    return json.dumps(value) if not isinstance(value, str) else str(value)


def summary(field: FieldInfo) -> str:
    """The field's description. Without one it is the first line of its object's docstring."""
    if field.description:
        return field.description
    inner = model_in(field.annotation)
    return ((inner.__doc__ or "").strip().splitlines() or [""])[0] if inner else ""


def _search(word: str) -> str:
    """The fields with a word in their name or description. Raises ExplainError if there is none."""
    fields = dict(fields_below(RLHFJob))
    exact = named(RLHFJob, word)
    found = exact + [path for path in fields if word.lower() in path.rpartition(".")[2].lower() and path not in exact]
    found += [path for path, field in fields.items() if word.lower() in summary(field).lower() and path not in found]
    if not found:
        close = difflib.get_close_matches(word, {path.rpartition(".")[2]: None for path in fields}, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ExplainError(f"{KIND} has no field {word!r}, and no field's description has the word{hint}")
    lines = [f"FIELDS with {word}:"]
    for path in found:
        lines += [f"  {path} <{short_type(fields[path])}>", _wrap(summary(fields[path]), 4), ""]
    return "\n".join(lines).rstrip() + "\n"


def _unknown(step: str, done: str, known: list[str]) -> str:
    if not known:
        return f"{done} has no fields; `dovetail explain {done}` says what it takes"
    close = difflib.get_close_matches(step, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
    return f"{done} has no field {step!r}; {hint}"


def _page(path: str, field: FieldInfo | None, model: type[BaseModel] | None) -> str:
    lines = [f"KIND:     {KIND}", f"VERSION:  {API_VERSION}", ""]
    if field is None:
        lines += ["DESCRIPTION:", _wrap((RLHFJob.__doc__ or "").strip(), 4)]
    else:
        lines += [f"FIELD:    {path.rpartition('.')[2]} <{short_type(field)}>"]
        required = "  (required)" if field.is_required() else ""
        lines[-1] += required
        if (default := default_of(field)) is not None:
            lines += [f"DEFAULT:  {default}"]
        if values := [] if model else options(field.annotation):
            lines += [f"ENUM:     {', '.join(values)}"]
        if model is None:
            lines += [f"TAKES:    {expected(field)}"]
        text = summary(field)
        own = " ".join((model.__doc__ or "").split()) if model else ""
        paragraphs = [own] if own.startswith(text.rstrip(".")) else [text, own]
        lines += ["", "DESCRIPTION:", *(_wrap(paragraph, 4) for paragraph in paragraphs if paragraph)]
    if model is not None and model.model_fields:
        lines += ["", "FIELDS:"]
        for name, inner in model.model_fields.items():
            extra = " -required-" if inner.is_required() else ""
            default = default_of(inner)
            extra += f"  (default {default})" if default is not None else ""
            lines += [f"  {alias(name, inner)} <{short_type(inner)}>{extra}", _wrap(summary(inner), 4), ""]
    return "\n".join(lines).rstrip() + "\n"


def _wrap(text: str, indent: int) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)
