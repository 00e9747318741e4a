"""What may become of a field after its job has begun, and where it has an effect. Both stand on the field, in
`types.py`: `Annotated[bool, ANYTIME, OnCluster("...")]`. The check of changes, the CRD's transition rules, the warnings
and the reference page are made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest.type_descriptions import model_in, short_type


@dataclass(frozen=True)
class Policy:
    """When a field may change. It counts for the fields below too, unless they have their own. `resumed`: when a run is
    resumed. `planned`: while a job on a cluster has a plan. If a run may not have another value, or not one in place of
    `not_from`, then because of `why`."""

    resumed: bool
    planned: Literal["always", "suspended", "never"]
    why: str = ""
    not_from: Any = None

    def allows(self, old: Any) -> bool:
        """Whether a resumed run may have another value than `old`."""
        return self.resumed and (self.not_from is None or old != self.not_from)


ANYTIME = Policy(resumed=True, planned="always")
WHEN_SUSPENDED = Policy(resumed=True, planned="suspended")
WHEN_RESUMED = Policy(resumed=True, planned="never")


def fixed(why: str) -> Policy:
    return Policy(resumed=False, planned="never", why=why)


# Of all fields that say nothing.
DEFAULT = fixed("steps since the last checkpoint are run again on resume and must give the same weights")


@dataclass(frozen=True)
class OnCluster:
    """The field has no effect on a single machine. `why` completes the sentence `<path>: <why>`. `used(object)` says
    whether the object with the field needs the effect, if it does not need it whenever the field is set."""

    why: str
    used: Callable[[Any], bool] = lambda _: True
    where = "single machine"
    told = "is not executed on a single machine"


@dataclass(frozen=True)
class NoEffect(OnCluster):
    """The field has no effect yet, anywhere."""

    where = "everywhere"
    told = "is not executed yet"


def of_field(field: FieldInfo, inherited: Policy) -> Policy:
    """A field's policy. `inherited` is that of the object that has it."""
    return next((item for item in field.metadata if isinstance(item, Policy)), inherited)


def at_path(model: type[BaseModel], path: str) -> Policy:
    """The policy of a field such as `data.prompts[0].path`. Its last steps may be keys of a free-form object."""
    found, here = DEFAULT, model
    for step in path.split("."):
        field = next((f for n, f in here.model_fields.items() if (f.alias or n) == step.partition("[")[0]), None)
        if field is None:
            break
        found, inner = of_field(field, found), model_in(field.annotation)
        if inner is None:
            break
        here = inner
    return found


def parts(
    model: type[BaseModel], of: Callable[[Policy], Any], prefix: str = "", inherited: Policy = DEFAULT
) -> Iterator[tuple[str, Any]]:
    """The largest parts of an object whose policies all give the same value, each with its path and the value. A path
    through list items is such as `groups[].image`."""
    for name, field in model.model_fields.items():
        path, mine = f"{prefix}{field.alias or name}", of_field(field, inherited)
        inner = model_in(field.annotation)
        items = "[]" if short_type(field).startswith("[]") else ""
        below = list(parts(inner, of, f"{path}{items}.", mine)) if inner else []
        if all(value == of(mine) for _, value in below):
            yield path, of(mine)
        else:
            yield from below


def resumable(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The fields that may change when a run is resumed. What is below a field that may is left out."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        if of_field(field, DEFAULT).resumed:
            yield path
        elif (inner := model_in(field.annotation)) is not None:
            yield from resumable(inner, f"{path}.")


def without_effect(value: BaseModel, path: str) -> Iterator[tuple[str, OnCluster]]:
    """The fields that are set below an object, and have no effect somewhere."""
    for name, field in type(value).model_fields.items():
        inner, where = getattr(value, name), f"{path}.{field.alias or name}"
        mark = next((item for item in field.metadata if isinstance(item, OnCluster)), None)
        if mark is not None:
            if inner != field.get_default(call_default_factory=True, validated_data={}) and mark.used(value):
                yield where, mark
        elif isinstance(inner, BaseModel):
            yield from without_effect(inner, where)
        elif isinstance(inner, list):
            for index, item in enumerate(inner):
                if isinstance(item, BaseModel):
                    yield from without_effect(item, f"{where}[{index}]")
