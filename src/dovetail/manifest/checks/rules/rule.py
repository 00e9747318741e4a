"""One row of the table of rules, and helper functions to write one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from dovetail.manifest.checks.cel import CelError, CelRule, as_seen, evaluate, formatted
from dovetail.manifest.types import RLHFJobSpec, Stage

# `{path}`, `{ppo.clip}` and `{value}` in a sentence, but not `{vocabSize: 512}`.
_HOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")

# A value in a sentence: expressions whose texts are joined, or for a rule in Python a function of the object.
Value = tuple[str, ...] | Callable[[Any], object]


class FoundObject(NamedTuple):
    """An object of a spec: where it is, the object, and the same as rules in CEL see it."""

    path: str
    value: Any
    seen: Any


@dataclass(frozen=True)
class Rule:
    """One row of the table. `at` has the places of the object that the rule is about, such as `spec` or `spec.groups[]`
    (`[]` stands for each item). If there is no such object, the rule holds. `holds` is the rule in CEL, where `self` is
    the object, or a Python function of the object if CEL cannot express the rule. `sentence` is the message if it does
    not hold. In it `{path}` is the object's path, `{minReplicas}` is a field below it, and other names are in `values`.
    The sentence of a rule about list items starts with `{path}`. With `by_type`, the API server refuses the manifest by
    the type of the list (a set, or a map by name), with a message of its own."""

    at: tuple[str, ...]
    holds: str | Callable[[Any], bool]
    sentence: str
    values: Mapping[str, Value] = field(default_factory=dict)
    by_type: bool = False

    def check(self, objects: Objects) -> Iterator[tuple[str, str]]:
        """The path and the sentence of each object that breaks the rule."""
        for place in self.at:
            for found in objects.at(place):
                if (sentence := self.told(found)) is not None:
                    yield found.path, sentence

    def told(self, found: FoundObject) -> str | None:
        """The sentence for one object. None if it satisfies the rule."""
        if not isinstance(self.holds, str):
            return None if self.holds(found.value) else self._fill(lambda name: self._value(found, name))
        try:
            if evaluate(self.holds, found.seen):
                return None
        except CelError:  # a part without a schema has another form than it should, which rules in Python are about
            return None
        return self._fill(lambda name: found.path if name == "path" else self._evaluated(name, found))

    def _evaluated(self, name: str, found: FoundObject) -> str:
        try:
            return str(evaluate(formatted(self._cel(name)), found.seen))
        except CelError:
            return "…"

    def cel_rules(self) -> Iterator[CelRule]:
        """The rule in the CRD, once for each place. Empty for a rule in Python."""
        for place in self.at if isinstance(self.holds, str) else ():
            sentence = self.sentence
            if "[]" in place:  # the API server puts the path of the item before it
                sentence = sentence.removeprefix("{path}").lstrip(".: ")
            message = _HOLE.sub(lambda hole: self._cel(hole[1]), sentence.replace("{path}", place))
            yield CelRule(place, str(self.holds), message)

    def shown(self) -> str:
        """The sentence for a page. Values that depend on the manifest are `…`."""
        path = _joined(self.at)
        return self._fill(lambda name: path if name == "path" else "…")

    def _fill(self, value: Callable[[str], str]) -> str:
        return _HOLE.sub(lambda hole: value(hole[1]), self.sentence)

    def _value(self, found: FoundObject, name: str) -> str:
        if name == "path":
            return found.path
        if callable(of := self.values.get(name)):
            return str(of(found.value))
        value = found.value
        for step in name.split("."):
            value = get(value, step)
        return str(value)

    def _cel(self, name: str) -> str:
        expressions = self.values.get(name, (f"self.{name}",))
        assert not callable(expressions), f"{name} of a rule in CEL is a Python function"
        return "".join(f"{{{expression}}}" for expression in expressions)


class Objects:
    """The objects of a spec by their place. Each place is looked up only once for all rules."""

    def __init__(self, spec: RLHFJobSpec) -> None:
        self._found = {"spec": [FoundObject("spec", spec, as_seen(spec))]}

    def at(self, place: str) -> list[FoundObject]:
        """The objects at a place. Those that are not given are left out."""
        if place not in self._found:
            parent, _, step = place.rpartition(".")
            name = step.removesuffix("[]")
            found = [
                FoundObject(f"{path}.{name}", inner, seen[name])
                for path, value, seen in self.at(parent)
                if (inner := get(value, name)) is not None
            ]
            if step.endswith("[]"):
                found = [
                    FoundObject(f"{path}[{i}]", *each)
                    for path, items, seen in found
                    for i, each in enumerate(zip(items, seen, strict=True))
                ]
            self._found[place] = found
        return self._found[place]


def get(value: Any, alias: str) -> Any:
    """A field of an object, by its name in manifests."""
    return getattr(value, _names(value.__class__)[alias])


@cache
def _names(model: type[BaseModel]) -> dict[str, str]:
    return {info.alias or name: name for name, info in model.model_fields.items()}


def _joined(places: tuple[str, ...]) -> str:
    """`a.{x,y}.b` for `a.x.b` and `a.y.b`. Places of each other length are joined in the same way."""
    found = []
    for length in sorted({place.count(".") for place in places}):
        steps = zip(*(place.split(".") for place in places if place.count(".") == length), strict=True)
        names = [tuple(dict.fromkeys(step)) for step in steps]
        found.append(".".join(step[0] if len(step) == 1 else f"{{{','.join(step)}}}" for step in names))
        found[-1] = re.sub(r"\{[^}]*\[\]\}", lambda names: names[0].replace("[]", "") + "[]", found[-1])
    return " or ".join(found)


def spec_rule(
    holds: str | Callable[[RLHFJobSpec], bool], sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    return Rule(("spec",), holds, sentence, values or {})


def ppo_rule(
    holds: str | Callable[[RLHFJobSpec], bool], sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    """A rule that holds if there is no ppo stage."""
    if isinstance(holds, str):
        return spec_rule(f"!('ppo' in self.stages) || {holds}", sentence, values)
    return spec_rule(lambda spec: Stage.PPO not in spec.stages or holds(spec), sentence, values)


def group_rule(holds: str, sentence: str, values: Mapping[str, Value] | None = None) -> Rule:
    return Rule(("spec.groups[]",), holds, sentence, values or {})


def listed(flags: Mapping[str, str], separator: str) -> tuple[str, ...]:
    """CEL expressions that together write the names whose expression in `flags` is true."""
    found, earlier = [], list(flags.values())
    for index, (name, flag) in enumerate(flags.items()):
        first = f"({' || '.join(earlier[:index])} ? '{separator}{name}' : '{name}')" if index else f"'{name}'"
        found.append(f"{flag} ? {first} : ''")
    return tuple(found)


def one_of(at: tuple[str, ...], *names: str) -> tuple[Rule, Rule]:
    # CEL reserves the word function.
    flags = {name: f"has(self.{'__function__' if name == 'function' else name})" for name in names}
    flag_list, known = f"[{', '.join(flags.values())}]", ", ".join(names)
    return (
        Rule(at, f"{flag_list}.exists(x, x)", f"{{path}} names nothing; give exactly one of {known}."),
        Rule(
            at,
            f"{flag_list}.filter(x, x).size() < 2",
            f"{{path}} has {{given}}; give exactly one of {known}.",
            {"given": listed(flags, " and ")},
        ),
    )


# Whether functions replace the reward model, in CEL.
CALLS = "(has(self.models.reward.__function__) || has(self.models.reward.functions))"
