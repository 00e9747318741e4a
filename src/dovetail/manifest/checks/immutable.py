"""Says which parts of a job's spec may change, as CEL transition rules, by the policies of `dovetail.manifest.types`.

At any time a user may suspend and resume a job, scale its rollout groups, and let a failed job try again. What decides
what is trained is fixed when the job has a plan (condition Planned=True) or has begun. Before that it may be corrected,
for example while Planned=False says what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.field_policy import parts
from dovetail.manifest.type_descriptions import model_in, short_type
from dovetail.manifest.types import Group, RLHFJobSpec

# A job that has begun stays fixed if no plan fits it anew, for example for another number of trainers. It may be
# corrected if a later release refuses it.
_UNPLANNED = (
    "!has(oldSelf.status) || !oldSelf.status.conditions.exists(c, c.type == 'Planned' && "
    "(c.status == 'True' || has(oldSelf.status.stage) && c.reason != 'InvalidSpec'))"
)
_SIDES = ("self", "oldSelf")
_AGAIN = "cannot change once the job is planned; delete the job and create it anew"
_SUSPENDED = "cannot change while the job may run; set spec.suspend to true first"


def _same(path: str) -> str:
    """Whether a field is the same before and after. A field of list items is compared item by item."""
    if "[]" in path:
        items, _, name = path.partition("[].")
        value = f"g.{name}" if _required(Group, name) else f"has(g.{name}) ? [g.{name}] : {_default(Group, name)}"
        return " == ".join(f"{side}.spec.{items}.map(g, {value})" for side in _SIDES)
    owner, _, name = f"spec.{path}".rpartition(".")
    field = _at(RLHFJobSpec, path)
    # CEL has no type for a field of several types, but its value.
    now, before = (
        f"dyn({side}.{owner}).{name}" if " | " in short_type(field) else f"{side}.{owner}.{name}" for side in _SIDES
    )
    if _filled(field):
        return f"{now} == {before}"
    return f"has({now}) == has({before}) && (!has({now}) || {now} == {before})"


def _field(model: type[BaseModel], name: str) -> FieldInfo:
    return next(f for n, f in model.model_fields.items() if (f.alias or n) == name)


def _required(model: type[BaseModel], name: str) -> bool:
    return _field(model, name).is_required()


def _default(model: type[BaseModel], name: str) -> str:
    """A list with the default of a list item's field, which the API server does not fill in. Empty for objects, and if
    there is none."""
    value = _field(model, name).get_default(call_default_factory=True, validated_data={})
    if isinstance(value, str | bool):
        return f"[{json.dumps(value)}]"
    return "[[]]" if value == [] else "[]"


def _at(model: type[BaseModel], path: str) -> FieldInfo:
    name, _, below = path.partition(".")
    field = _field(model, name)
    return _at(model_in(field.annotation) or model, below) if below else field


def _filled(field: FieldInfo) -> bool:
    """Whether the field always has a value: it is required, or the API server fills in a default. CEL knows no null."""
    default = field.get_default(call_default_factory=True, validated_data={})
    return field.is_required() or (default is not None and type(None) not in get_args(field.annotation))


def _rules() -> Iterator[CelRule]:
    found = list(parts(RLHFJobSpec, lambda policy: policy.planned))
    for (owner, planned), group in groupby(found, lambda part: (_owner(part[0]), part[1])):
        paths = [path for path, _ in group]
        alone = len(paths) == 1
        same = _same(paths[0]) if alone else " && ".join(f"({_same(path)})" for path in paths)
        path, others = paths[0], [p for p, other in found if _owner(p) == owner and other != planned]
        if not alone:
            path = f"{owner}, other than {' and '.join(other.partition('.')[2] for other in others)},"
        items, inside, name = path.partition("[].")
        what = f"{name} of a group in spec.{items}" if inside else f"spec.{path}"
        if path == "groups[].name":
            what = "The list of names in spec.groups"
        field = f".spec.{items if alone else owner}"
        if planned == "never":
            yield _rule(same, f"{what} {_AGAIN}.", field)
        elif planned == "suspended":
            yield _rule(f"self.spec.suspend || ({same})", f"{what} {_SUSPENDED}.", field)


def _owner(path: str) -> str:
    """The object whose unchangeable fields have one rule together. A field of list items is alone."""
    return path if "[]" in path else path.partition(".")[0]


def _rule(holds: str, sentence: str, field: str) -> CelRule:
    return CelRule("", f"{_UNPLANNED} || {holds}", sentence, field)


TRANSITION_RULES: tuple[CelRule, ...] = (
    *_rules(),
    # What depends on more than the field.
    _rule(
        "self.spec.suspend || "
        + " == ".join(
            f"{side}.spec.groups.filter(g, 'trainer' in g.roles).map(g, has(g.replicas) ? g.replicas : 1)"
            for side in ("self", "oldSelf")
        ),
        f"replicas of a trainer group in spec.groups {_SUSPENDED}.",
        ".spec.groups",
    ),
    _rule(
        "self.spec.ppo.iterations == oldSelf.spec.ppo.iterations || !has(oldSelf.status.stage) || "
        "oldSelf.status.stage != 'ppo' || !has(oldSelf.status.iteration) || "
        "self.spec.ppo.iterations >= oldSelf.status.iteration",
        "spec.ppo.iterations cannot be lower than the number of finished iterations.",
        ".spec.ppo.iterations",
    ),
    _rule(
        "self.spec.storage.retain == oldSelf.spec.storage.retain || self.spec.storage.retain == 'Keep'",
        "spec.storage.retain cannot change to Delete once the job is planned; delete the claim when the job is gone.",
        ".spec.storage.retain",
    ),
)
