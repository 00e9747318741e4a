"""One row of the table of rules, and helper functions to write one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from dovetail.manifest.checks.cel import CelRule
from dovetail.manifest.types import Group, RLHFJobSpec, Stage

# `{path}`, `{ppo.clip}` and `{value}` in a sentence, but not `{vocabSize: 512}`.
_HOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True)
class Value:
    """A value in a sentence. Python computes it with `of(object)`, and the API server with the joined values of
    `cel`."""

    of: Callable[[Any], object]
    cel: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One row of the table. `at` has the places of the object that the predicate gets, such as `spec` or
    `spec.groups[]` (`[]` stands for each item). If there is no such object, the rule holds. `holds` is the predicate in
    Python. `cel` is the same predicate in CEL, where `self` is the object. It is None if CEL cannot express it.
    `sentence` is the message if the predicate is false. In it `{path}` is the object's path, `{minReplicas}` is a field
    below it, and other names are in `values`. The sentence of a rule about list items starts with `{path}`. With
    `by_type`, the API server refuses the manifest by the type of the list (a set, or a map by name), with a message of
    its own."""

    at: tuple[str, ...]
    holds: Callable[[Any], bool]
    cel: str | None
    sentence: str
    values: Mapping[str, Value] = field(default_factory=dict)
    by_type: bool = False

    def check(self, objects: Objects) -> Iterator[tuple[str, str]]:
        """The path and the sentence of each object that breaks the rule."""
        for place in self.at:
            for path, found in objects.at(place):
                if (sentence := self.told(found, path)) is not None:
                    yield path, sentence

    def told(self, found: Any, path: str) -> str | None:
        """The sentence for one object, `found` at `path`. None if it satisfies the rule."""
        return None if self.holds(found) else self._fill(partial(self._value, found, path))

    def cel_rules(self) -> Iterator[CelRule]:
        """The rule in the CRD, once for each place. Empty without CEL."""
        for place in self.at if self.cel is not None else ():
            sentence = self.sentence
            if "[]" in place:  # the API server puts the path of the item before it
                sentence = sentence.removeprefix("{path}").lstrip(".: ")
            message = _HOLE.sub(lambda hole: self._cel(hole[1]), sentence.replace("{path}", place))
            yield CelRule(place, self.cel or "", message)

    def shown(self) -> str:
        """The sentence for a page. Values that depend on the manifest are `…`."""
        path = _joined(self.at)
        return self._fill(lambda name: path if name == "path" else "…")

    def _fill(self, value: Callable[[str], str]) -> str:
        return _HOLE.sub(lambda hole: value(hole[1]), self.sentence)

    def _value(self, found: Any, path: str, name: str) -> str:
        if name == "path":
            return path
        if name in self.values:
            return str(self.values[name].of(found))
        for step in name.split("."):
            found = get(found, step)
        return str(found)

    def _cel(self, name: str) -> str:
        expressions = self.values[name].cel if name in self.values else (f"self.{name}",)
        return "".join(f"{{{expression}}}" for expression in expressions)


class Objects:
    """The objects of a spec by their place. Each place is looked up only once for all rules."""

    def __init__(self, spec: RLHFJobSpec) -> None:
        self._found: dict[str, list[tuple[str, Any]]] = {"spec": [("spec", spec)]}

    def at(self, place: str) -> list[tuple[str, Any]]:
        """The path and value of each object at a place. Objects that are not given are left out."""
        if place not in self._found:
            parent, _, step = place.rpartition(".")
            name = step.removesuffix("[]")
            found = [(f"{path}.{name}", get(value, name)) for path, value in self.at(parent)]
            if step.endswith("[]"):
                found = [(f"{path}[{i}]", item) for path, items in found for i, item in enumerate(items or ())]
            self._found[place] = [(path, value) for path, value in found if value is not None]
        return self._found[place]


def get(value: Any, alias: str) -> Any:
    """A field of an object, by its name in manifests."""
    return getattr(value, _names(value.__class__)[alias])


@cache
def _names(model: Any) -> dict[str, str]:
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
    holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    return Rule(("spec",), holds, cel, sentence, values or {})


def ppo_rule(
    holds: Callable[[RLHFJobSpec], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    """A rule that holds if there is no ppo stage."""
    return spec_rule(
        lambda spec: Stage.PPO not in spec.stages or holds(spec),
        None if cel is None else f"!('ppo' in self.stages) || {cel}",
        sentence,
        values,
    )


def group_rule(
    holds: Callable[[Group], bool], cel: str | None, sentence: str, values: Mapping[str, Value] | None = None
) -> Rule:
    return Rule(("spec.groups[]",), holds, cel, sentence, values or {})


def listed(flags: Mapping[str, str], separator: str) -> tuple[str, ...]:
    """CEL expressions that together write the names whose expression in `flags` is true."""
    found, earlier = [], list(flags.values())
    for index, (name, flag) in enumerate(flags.items()):
        first = f"({' || '.join(earlier[:index])} ? '{separator}{name}' : '{name}')" if index else f"'{name}'"
        found.append(f"{flag} ? {first} : ''")
    return tuple(found)


def one_of(at: tuple[str, ...], *names: str) -> tuple[Rule, Rule]:
    flags = {name: f"has(self.{name})" for name in names}
    flag_list, known = f"[{', '.join(flags.values())}]", ", ".join(names)

    def given(source: Any) -> list[str]:
        return [name for name in names if get(source, name) is not None]

    return (
        Rule(
            at,
            lambda source: bool(given(source)),
            f"{flag_list}.exists(x, x)",
            f"{{path}} names nothing; give exactly one of {known}.",
        ),
        Rule(
            at,
            lambda source: len(given(source)) < 2,
            f"{flag_list}.filter(x, x).size() < 2",
            f"{{path}} has {{given}}; give exactly one of {known}.",
            {"given": Value(lambda source: " and ".join(given(source)), listed(flags, " and "))},
        ),
    )


# Whether functions replace the reward model, in CEL.
CALLS = "(has(self.models.reward.__function__) || has(self.models.reward.functions))"
