"""Random specs that the types accept; most break rules between fields. They are made of the types, so that a new
field is varied too."""

from __future__ import annotations

import copy
import re
import types
from enum import StrEnum
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.manifest.types import RLHFJobSpec
from helpers.manifests import GOOD

_CALLABLES = ("a:b", "c:b", "a:c")
# Texts that rules tell apart, by the field's name; other fields get a word.
_TEXTS: dict[str, tuple[str, ...]] = {
    "url": ("http://environments:8080",),
    "name": ("a", "b", "trainer", "coordinator"),
    "pvc": ("claim", "claim/", "/claim", "claim/folder", "claim//folder/", "it's/here", "%s", "%s/x"),
    "split": ("train", "test"),
    "endpoint": ("http://minio:9000",),
    "managedBy": ("dovetail.dev/operator", "kueue.x-k8s.io/multikueue"),
    "product": ("A100", "Tesla-V100-SXM2"),
    "vllmArgs": ("--port=1", "--load_format=x=y", "-pp", "--seed", "--max-model-len=9", "="),
}
_CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"vocab_size": 9},
    {"hidden_size": 64, "num_attention_heads": 3},
    {"hidden_size": 64, "num_attention_heads": 4},
    {"hidden_size": "wide", "num_attention_heads": 2, "num_hidden_layers": None},
    {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 3, "max_position_embeddings": 5},
    {"hidden_size": 64, "head_dim": None, "num_hidden_layers": 2},
)


def random_spec(seed: int) -> RLHFJobSpec:
    """A spec that types accept. Some are a good one with few fields changed, some are random all over."""
    random = Random(seed)
    density = random.choice((0.01, 0.1, 0.4, 0.7))
    changes = _Generator(random, density).object(RLHFJobSpec)
    if random.random() < 0.5:  # groups are required, and random ones are seldom good
        del changes["groups"]
    data = _merged(copy.deepcopy(GOOD["spec"]), changes)
    if random.random() < 0.1:
        data["models"].pop("tokenizer", None)
    return RLHFJobSpec.model_validate(data)


def _merged(good: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        both = isinstance(value, dict) and isinstance(good.get(key), dict)
        good[key] = _merged(good[key], value) if both else value
    return good


class _Generator:
    """`density`: the share of optional fields that are set."""

    def __init__(self, random: Random, density: float) -> None:
        self._random = random
        self._density = density

    def object(self, model: type[BaseModel]) -> dict[str, Any]:
        chosen = {}
        for name, info in model.model_fields.items():
            nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            if info.is_required() or nested or self._random.random() < self._density:
                chosen[info.alias or name] = self._value(info.annotation, list(info.metadata), info.alias or name)
        return chosen

    def _value(self, kind: Any, metadata: list[Any], name: str) -> Any:
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            inner = [m for part in args[1:] for m in (part.metadata if isinstance(part, FieldInfo) else [part])]
            return self._value(args[0], metadata + inner, name)
        if origin in (Union, types.UnionType):
            return self._value(self._random.choice(args), metadata, name)
        if origin is Literal:
            return self._random.choice(args)
        if origin is list:
            low = next((m.min_length for m in metadata if isinstance(m, MinLen)), 0)
            high = min(3, *(m.max_length for m in metadata if isinstance(m, MaxLen)), 3)
            return [self._value(args[0], [], name) for _ in range(self._random.randint(low, high))]
        if origin is dict:
            return copy.deepcopy(self._random.choice(_CONFIGS if name == "config" else ({}, {"spec": {"x": [1]}})))
        return self._scalar(kind, metadata, name)

    def _scalar(self, kind: Any, metadata: list[Any], name: str) -> Any:
        if kind is type(None):
            return None
        if issubclass(kind, BaseModel):
            return self.object(kind)
        if issubclass(kind, StrEnum):
            return self._random.choice([member.value for member in kind])
        if kind is bool:
            return self._random.random() < 0.5
        if kind is str:
            patterns = [m.pattern for m in metadata if getattr(m, "pattern", None)]
            texts = _TEXTS.get(name, ("word", *_CALLABLES))
            fitting = [text for text in texts if all(re.search(pattern, text) for pattern in patterns)]
            assert fitting, f"none of {texts} fits {patterns} of {name}; add some here"
            return self._random.choice(fitting)
        low = next((m.ge for m in metadata if isinstance(m, Ge)), None)
        high = next((m.le for m in metadata if isinstance(m, Le)), None)
        if kind is int:
            return self._random.randint(low or 0, min((low or 0) + 8, high or 99))
        above = next((m.gt for m in metadata if isinstance(m, Gt)), None)
        below = next((m.lt for m in metadata if isinstance(m, Lt)), None)
        inside = [
            value
            for value in (0.0, 0.5, 1.0, 2.0)
            if (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
            and (below is None or value < below)
        ]
        return self._random.choice(inside)
