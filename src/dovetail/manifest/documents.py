"""Turns YAML into an RLHFJob, or into sentences that name the field and how to correct it."""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dovetail.manifest.type_descriptions import describe, expected, model_in, named
from dovetail.manifest.types import API_VERSION, API_VERSIONS, KIND, RLHFJob

_MAX_BYTES = 4 * 1024 * 1024
# The maximum number of values of a document, including those that its aliases stand for. The largest of our examples
# has about 300.
_MAX_VALUES = 20_000


class ManifestError(ValueError):
    """A manifest that cannot be run. `errors` has one sentence for each problem. The message has one per line."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2 scalars, so `Off` is text and `1e-5` is a number. It refuses repeated keys, and limits the number
    of values, because a few aliases of aliases stand for billions."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values = 0
        self._sizes: dict[int, int] = {}  # by identity of each complete node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        before = self._values
        node = super().compose_node(parent, index)
        if alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias must not stand for what it is part of", mark)
        self._values += self._sizes[id(node)] if alias else 1
        if not alias:
            self._sizes[id(node)] = self._values - before
        if self._values > _MAX_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {_MAX_VALUES} values, counting what aliases stand for; use fewer", mark
            )
        return node


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "float", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name = str(key.value)
        if name in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"`{name}` is given twice; keep one of them", key.start_mark
            )
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(source: str | Path) -> Any:
    """The one YAML document in a file or in the text itself. A file is a Path, or text of one line that names one.

    Raises ManifestError."""
    text, name = _text(source)
    try:
        documents = list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ManifestError([f"{name}{where}: not valid YAML: {error.problem or error.context}."]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = (str(error).splitlines() or ["nested too deeply"])[0]
        raise ManifestError([f"{name}: not valid YAML: {first}."]) from error
    documents = [document for document in documents if document is not None]
    if len(documents) != 1:
        found = f"holds {len(documents)} documents" if documents else "is empty"
        raise ManifestError([f"{name} {found}; give exactly one RLHFJob."])
    return documents[0]


class FieldLines:
    """The lines of fields in a manifest file. `ignored` has fields that do not come from the file, such as
    `spec.ppo.iterations`."""

    def __init__(self, path: Path, ignored: Sequence[str] = ()) -> None:
        self._path = path
        self._ignored = tuple(_steps(name) for name in ignored)
        try:
            nodes = list(yaml.compose_all(_text(path)[0], Loader=_Loader))
        except (yaml.YAMLError, ValueError, RecursionError):
            nodes = []
        self._root = nodes[0] if nodes else None

    def located(self, sentence: str) -> str:
        """The sentence with file and line before it if it begins with a field, as in `job.yaml:12: spec.ppo.clip must
        be ...`. For a missing field it is the line of the object that should have it."""
        field = _FIELD.match(sentence)
        steps = _steps(field[0]) if field else ()
        if self._root is None or not steps or any(steps[: len(own)] == own for own in self._ignored):
            return sentence
        line = self._line(steps)
        return sentence if line is None else f"{self._path}:{line}: {sentence}"

    def _line(self, steps: tuple[str | int, ...]) -> int | None:
        """The line, counted from 1. None if not even the first step of the path exists."""
        node, line = self._root, None
        for step in steps:
            if isinstance(node, yaml.MappingNode):
                pair = next((pair for pair in node.value if pair[0].value == step), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
            else:
                break
        return line


_FIELD = re.compile(r"(?:apiVersion|kind|metadata|spec)\b(?:\.\w+|\[\d+\])*")


def _steps(field: str) -> tuple[str | int, ...]:
    """`spec.groups[0].name` as ("spec", "groups", 0, "name")."""
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"\w+", field))


def _text(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or ":" in source or "{" in source) and not is_file(source):
        return source, "the manifest"
    path = Path(source)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ManifestError([f"{path} is larger than {_MAX_BYTES // 2**20} MiB; that is not a manifest."])
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise ManifestError([f"{path} is not UTF-8 text; save it as UTF-8."]) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ManifestError([f"{path}: cannot read the manifest: {reason.lower()}."]) from error


def is_file(text: str | Path) -> bool:
    """Whether this names an existing file. Never raises, even for text that cannot be a path."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


# The fields in which a spec names files of this machine.
_OF_THIS_MACHINE = ("models", "data", "evaluation", "ppo", "output")


def with_home(data: Any) -> Any:
    """A manifest's plain data, with the home folder in place of the `~` at the beginning of local paths. It is for jobs
    on this machine, because pods have other folders."""
    spec = data.get("spec") if isinstance(data, dict) else None
    if not isinstance(spec, dict):
        return data
    return data | {"spec": spec | {name: _at_home(spec[name]) for name in _OF_THIS_MACHINE if name in spec}}


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: os.path.expanduser(item) if key in ("path", "importPath") and isinstance(item, str) else _at_home(item)
        for key, item in value.items()
    }


def parse(data: Any) -> RLHFJob:
    """An RLHFJob from plain YAML or JSON data. Its fields are checked one by one. Raises ManifestError."""
    if not isinstance(data, dict):
        raise ManifestError([f"The manifest must be a mapping that starts with `apiVersion: {API_VERSION}`."])
    for key, allowed in (("apiVersion", API_VERSIONS), ("kind", (KIND,))):
        if data.get(key) not in allowed:
            given = f"it is {_show(data[key])}" if key in data else "it is missing"
            raise ManifestError([f"{key} must be {' or '.join(allowed)}; {given}."])
    try:
        # JSON mode is strict about types but takes enumerations by value.
        return RLHFJob.model_validate_json(
            json.dumps(_with_modules(data), default=str), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as error:
        raise ManifestError(_sentences(error, data)) from error


_FILE = re.compile(r"(?:(.*)/)?([A-Za-z_]\w*)\.py:([A-Za-z_]\w*)", re.DOTALL)


def _with_modules(data: dict[str, Any]) -> dict[str, Any]:
    """The data with functions that are written as FILE.py:FUNCTION, as on the command line, in the form
    module:callable. The file's folder becomes the importPath, if there is none. What cannot be written so stays."""
    spec = copy.deepcopy(data.get("spec"))
    places: list[tuple[Any, Any, Any]] = []  # the object with importPath, and what holds a function by which key

    def part(kind: type, *names: str) -> Any:
        found = spec
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, kind) else kind()

    models, reward, ppo = part(dict, "models"), part(dict, "models", "reward"), part(dict, "ppo")
    metrics, functions = part(list, "evaluation", "metrics"), part(list, "models", "reward", "functions")
    places += [(reward, reward, "function"), (ppo, ppo, "loss"), (ppo, ppo, "advantageFunction")]
    places += [(reward, each, "function") for each in functions if isinstance(each, dict)]
    places += [(reward, metrics, index) for index in range(len(metrics))]
    for holder, named_in, key in places:
        value = named_in[key] if isinstance(named_in, list) else named_in.get(key)
        found = _FILE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            continue
        folder, module, function = found.groups()
        if folder is not None and holder.get("importPath", folder) != folder:
            continue
        if folder is not None:
            holder["importPath"] = folder
            if holder is reward and isinstance(spec, dict) and spec.setdefault("models", models) is models:
                models.setdefault("reward", reward)  # metrics in a job that names no reward
        named_in[key] = f"{module}:{function}"
    return data if spec is None else data | {"spec": spec}


def _sentences(error: ValidationError, data: Any) -> list[str]:
    """One sentence per field, in the manifest's order. If a union failed in every branch, there is one sentence for all
    branches."""
    found: dict[tuple[str | int, ...], str] = {}
    for problem in error.errors(include_url=False):
        path = _real_path(problem["loc"], data, problem["type"])
        if problem["type"] == "missing" or path not in found:
            found[path] = _sentence(path, problem["type"], problem["msg"], data)
    # A branch of a union that failed deeper says more than one that failed at its top.
    deeper = [path for path in found if not any(other != path and other[: len(path)] == path for other in found)]
    return [found[path] for path in deeper]


def _real_path(loc: tuple[str | int, ...], data: Any, kind: str) -> tuple[str | int, ...]:
    """`loc` without pydantic's names of union branches, which no manifest contains."""
    path: list[str | int] = []
    for position, step in enumerate(loc):
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            path.append(step)
            data = data[step]
        elif kind == "missing" and position == len(loc) - 1:
            path.append(step)
    return tuple(path)


def dotted(path: tuple[str | int, ...]) -> str:
    """`("spec", "groups", 0, "name")` as `spec.groups[0].name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _sentence(path: tuple[str | int, ...], kind: str, message: str, data: Any) -> str:
    name = dotted(path)
    if kind == "missing":
        field = _field(path)
        what = f" ({field.description.rstrip('.')})" if field and field.description else ""
        return f"{name} is required{what}; add it."
    if kind == "extra_forbidden":
        return _unknown(path)
    field = _field(path)
    value = _value(path, data)
    if field is None:
        return f"{name} is {_show(value)}: {message}."
    wanted = _element(field) if isinstance(path[-1], int) else expected(field)
    if kind in ("too_short", "too_long"):
        return f"{name} must be {wanted}; it has {len(value)}."
    return f"{name} must be {wanted}; it is {_show(value)}."


def _element(field: FieldInfo) -> str:
    args = getattr(field.annotation, "__args__", None)
    return describe(args[0], []) if args else expected(field)


def _unknown(path: tuple[str | int, ...]) -> str:
    parent = _model(path[:-1])
    known = [field.alias or name for name, field in parent.model_fields.items()] if parent else []
    wrong = str(path[-1])
    where = dotted(path[:-1]) or "the manifest"
    # A field of this name further below says more than one beside it with a name that is only similar.
    below = named(parent, wrong) if parent else []
    prefix = f"{dotted(path[:-1])}." if len(path) > 1 else ""
    close = [name if "." not in name else f"{prefix}{name}".replace("[]", "[0]") for name in below]
    close = close or difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    close = close or [name.replace("[]", "[0]") for name in named(RLHFJob, wrong)]
    fix = f"did you mean {' or '.join(close[:2])}?" if close else f"{where} has {', '.join(known)}."
    return f"{dotted(path)} is not a field; {fix}"


def _model(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = RLHFJob
    for step in path:
        if isinstance(step, int) or model is None:
            continue
        field = _named(model, step)
        model = model_in(field.annotation) if field else None
    return model


def _field(path: tuple[str | int, ...]) -> FieldInfo | None:
    names = [step for step in path if isinstance(step, str)]
    parent = _model(tuple(names[:-1]))
    return _named(parent, names[-1]) if parent and names else None


def _named(model: type[BaseModel], alias: str) -> FieldInfo | None:
    return next((f for name, f in model.model_fields.items() if (f.alias or name) == alias), None)


def _value(path: tuple[str | int, ...], data: Any) -> Any:
    for step in path:
        data = data[step]
    return data


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + '..."'
