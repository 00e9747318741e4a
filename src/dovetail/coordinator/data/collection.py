"""All data of a job. Each list of sources is loaded, split between the stages, partly held out, and blended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.fingerprints import Fingerprint, compare, fingerprint
from dovetail.coordinator.data.records import STAGE_OF, Demonstration, Judged, Labelled, Prompt, Records
from dovetail.coordinator.data.sources import Rows, identity, load
from dovetail.coordinator.data.text.chat_template import ChatFormat
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.sampling import derived_seed

Indices = NDArray[np.int64]


def permutation(size: int, *key: int | str) -> Indices:
    """A permutation of range(size), (size,) int64. It depends only on `size` and the key."""
    return np.random.Generator(np.random.PCG64(derived_seed(*key))).permutation(size).astype(np.int64)


def split(size: int, shares: Mapping[str, float], *key: int | str) -> dict[str, Indices]:
    """Disjoint random parts of range(size), in proportion to `shares`, each (n,) int64. Together they cover the range.
    Each part with a positive share gets at least one record if there are enough. Raises ValueError if no share is
    positive."""
    total = sum(shares.values())
    if total <= 0:
        raise ValueError("no share is positive")
    wanted = [name for name in sorted(shares) if shares[name] > 0]
    order = permutation(size, "split", *key)
    bounds = np.rint(np.cumsum([shares[name] for name in wanted]) / total * size).astype(int)
    if size >= len(wanted):
        for i in range(len(bounds)):  # each part gets at least one, from both ends
            bounds[i] = min(max(bounds[i], (bounds[i - 1] if i else 0) + 1), size - (len(bounds) - 1 - i))
    parts = dict(zip(wanted, np.split(order, bounds[:-1]), strict=True))
    return {name: parts.get(name, np.zeros(0, np.int64)) for name in shares}


def hold_out(part: Indices, share: float) -> tuple[Indices, Indices]:
    """The indices of the records to train on, and of those held out, each (n,) int64. At least one is held out if
    `share` > 0, and at least one is left for training if `share` < 1."""
    count = round(len(part) * share)
    if share > 0:
        count = max(count, 1)
    if share < 1:
        count = min(count, len(part) - 1)
    count = max(count, 0)
    return part[count:], part[:count]


class Blend:
    """An endless sequence of (source, position in source), interleaved in proportion to the weights.

    After n picks, each source has had its share of n, within 1. Each source is read in epochs. An epoch has its own
    order, and has every record once."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *key: int | str) -> None:
        """Raises ValueError for an empty source, because it could not provide its share."""
        if len(sizes) != len(weights) or not sizes:
            raise ValueError("a blend needs one weight for each of at least one source")
        if min(sizes) < 1 or min(weights) <= 0:
            raise ValueError("a blend needs at least one record and a positive weight in every source")
        self.sizes = list(sizes)
        self._key = key
        self._weights = np.asarray(weights, np.float64) / sum(weights)
        self._sources: list[int] = []  # the source of pick n
        self._turns: list[int] = []  # how often that source was picked before
        self._counts = np.zeros(len(sizes), np.int64)
        self._order = lru_cache(maxsize=2 * len(sizes))(
            lambda source, epoch: permutation(self.sizes[source], "epoch", *key, source, epoch)
        )

    def __len__(self) -> int:
        """The number of records of all sources. This is one epoch of the blend if the weights are in proportion to the
        sizes."""
        return sum(self.sizes)

    def pick(self, n: int) -> tuple[int, int]:
        """The n-th pick, counted from 0."""
        source, turn = (0, n) if len(self.sizes) == 1 else self._turn(n)
        epoch, within = divmod(turn, self.sizes[source])
        return source, int(self._order(source, epoch)[within])

    def batch(self, step: int, size: int) -> list[tuple[int, int]]:
        """The `size` picks of a step. Steps count from 1. Raises ValueError for a step below 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return [self.pick(n) for n in range((step - 1) * size, step * size)]

    def _turn(self, n: int) -> tuple[int, int]:
        # The next source is the one furthest below its share, or the first of several equal ones. This rule needs all
        # earlier picks.
        while len(self._sources) <= n:
            lag = self._weights * (len(self._sources) + 1) - self._counts
            source = int(np.argmax(lag))
            self._sources.append(source)
            self._turns.append(int(self._counts[source]))
            self._counts[source] += 1
        return self._sources[n], self._turns[n]


R = TypeVar("R")
Place = tuple[int, int]  # a source of a list, and a record of this source
HELD_OUT_LIMIT = 4096  # a stage evaluates at most this many records, because more would take long


@dataclass(frozen=True)
class SourcePart(Generic[R]):
    """The records of one source in one list. `train` has the positions in the source of the records to train on, and
    `held_out` those of the held-out records. Each is (n,) int64."""

    records: Records[R]
    train: Indices
    held_out: Indices
    weight: float


class StageData(Generic[R]):
    """The blended records of one list."""

    def __init__(self, parts: list[SourcePart[R]], *key: int | str) -> None:
        self.parts = parts
        self._blend = Blend([len(p.train) for p in parts], [p.weight for p in parts], *key)

    def __len__(self) -> int:
        """The number of records to train on."""
        return len(self._blend)

    def batch(self, step: int, size: int) -> list[R]:
        """The records of a step, `size` of them. Steps count from 1. They depend only on the job's seed and the
        step."""
        return [self.parts[source].records[record] for source, record in self.places(step, size)]

    def places(self, step: int, size: int) -> list[Place]:
        """The places of the records of `batch`."""
        return [(source, int(self.parts[source].train[i])) for source, i in self._blend.batch(step, size)]

    def steps_per_epoch(self, size: int) -> int:
        """The number of batches of `size` that hold every record once. The last batch is filled with records of the
        next epoch."""
        return -(-len(self) // size)

    def held_out(self) -> list[R]:
        """The held-out records for evaluation."""
        return [self.parts[source].records[record] for source, record in self.held_out_places()]

    def held_out_places(self) -> list[Place]:
        """The places of the records of `held_out`, about 4,096 at most, in proportion to the held-out parts of the
        sources."""
        total = sum(len(p.held_out) for p in self.parts)
        keep = min(1.0, HELD_OUT_LIMIT / max(total, 1))
        return [
            (source, int(i))
            for source, p in enumerate(self.parts)
            for i in p.held_out[: max(1, int(len(p.held_out) * keep))]
        ]

    def training_places(self) -> Iterator[Place]:
        """The place of each record to train on, once."""
        for source, part in enumerate(self.parts):
            for i in part.train:
                yield source, int(i)

    def training_records(self) -> Iterator[R]:
        """Each record to train on, once."""
        for source, record in self.training_places():
            yield self.parts[source].records[record]


@dataclass(frozen=True)
class Collection:
    """The lists of a job. A list that no stage needs is None. `fingerprints` has the fingerprint of each source, by
    manifest field. `evaluated` has the records of spec.evaluation.prompts, by source."""

    demonstrations: StageData[Demonstration] | None
    preferences: StageData[Judged] | None
    prompts: StageData[Prompt] | None
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    evaluated: list[Records[Prompt]] = field(default_factory=list)

    def evaluation_prompts(self, held_out: int) -> list[Prompt]:
        """The prompts that an evaluation answers. If the manifest names prompts for it, they are the first 4,096 of
        them. Otherwise they are `held_out` of the held-out prompts."""
        if self.evaluated:
            every = (source[i] for source in self.evaluated for i in range(len(source)))
            return list(islice(every, HELD_OUT_LIMIT))
        return self.prompts.held_out()[:held_out] if self.prompts is not None else []

    @property
    def prompt_fields(self) -> frozenset[str]:
        """Every name that a prompt of PPO has in its `fields`."""
        return _names([part.records for part in self.prompts.parts] if self.prompts is not None else [])

    @property
    def evaluation_fields(self) -> frozenset[str]:
        """Every name that a prompt of the evaluations has in its `fields`."""
        return _names(self.evaluated) if self.evaluated else self.prompt_fields

    def texts(self) -> Iterator[str]:
        """All text to train on, for training a tokenizer. It does not include held-out records."""
        for d in self.demonstrations.training_records() if self.demonstrations else ():
            yield d.text
        for p in self.preferences.training_records() if self.preferences else ():
            if isinstance(p, Labelled):
                yield p.prompt + p.response
            else:
                yield p.prompt + p.chosen
                yield p.rejected
        for q in self.prompts.training_records() if self.prompts else ():
            yield q.prompt


def _names(sources: Sequence[Records[Prompt]]) -> frozenset[str]:
    return frozenset().union(*(each.fields for each in sources if isinstance(each, Rows)))


def needed(spec: RLHFJobSpec) -> list[DataKind]:
    """The lists that the job's stages read: demonstrations for SFT and ptx, preferences for the reward model and DPO,
    and prompts for PPO."""
    stages = set(spec.stages)
    kinds: list[DataKind] = []
    if Stage.SFT in stages or (Stage.PPO in stages and spec.ppo.ptx_coef > 0):
        kinds.append("demonstrations")
    if {Stage.REWARD, Stage.DPO} & stages:
        kinds.append("preferences")
    if Stage.PPO in stages:
        kinds.append("prompts")
    return kinds


def collect(
    spec: RLHFJobSpec,
    base_dir: Path,
    cache_dir: Path,
    chat: ChatFormat | None,
    known: Mapping[str, Fingerprint] | None = None,
) -> Collection:
    """Load, split and blend the data. Raises DataError that names the manifest field. It is also raised if a source
    differs from its fingerprint in `known`. These fingerprints were taken when the run began.

    A data set that only one list names is used completely. A data set that several lists name is split between their
    stages without overlap, in proportion to `spec.data.split`. Only stages that run count."""
    kinds = needed(spec)
    users: dict[str, set[DataKind]] = {}
    prints: dict[str, Fingerprint] = {}
    for kind in kinds:
        sources = getattr(spec.data, kind)
        if not sources:
            raise DataError(f"spec.data.{kind} is empty, but stage {_reader(kind, spec)} needs it")
        for i, source in enumerate(sources):
            users.setdefault(identity(source, kind, i, base_dir), set()).add(kind)

    def stage_data(kind: DataKind) -> StageData[Any] | None:
        if kind not in kinds:
            return None
        parts: list[SourcePart[Any]] = []
        for i, source in enumerate(getattr(spec.data, kind)):
            name = f"spec.data.{kind}[{i}]"
            records = load(source, kind, field=name, base_dir=base_dir, cache_dir=cache_dir, seed=spec.seed, chat=chat)
            if kind == "preferences":
                _one_shape(spec, name, records, parts)
            print_ = fingerprint(source, records, name, base_dir)
            if print_ is not None:
                prints[name] = print_
            key = identity(source, kind, i, base_dir)
            shares: dict[str, float] = {k: float(getattr(spec.data.split, STAGE_OF[k].value)) for k in users[key]}
            if len(shares) == 1:
                shares = dict.fromkeys(shares, 1.0)
            if shares[kind] <= 0:
                raise DataError(
                    f"spec.data.split gives stage {_reader(kind, spec)} no share of {name}, which other stages use too"
                )
            # The split must not depend on the folder of the run's files. The name of a path is enough to distinguish
            # data sets.
            mine = split(len(records), shares, spec.seed, _label(key))[kind]
            train, held = hold_out(mine, spec.data.held_out)
            if not len(train):
                raise DataError(
                    f"{name} leaves stage {_reader(kind, spec)} nothing to train on: of {len(records)} records "
                    f"its share is {len(mine)}, and {len(held)} are held out; add data or lower spec.data.heldOut"
                )
            parts.append(SourcePart(records, train, held, source.weight))
        return StageData(parts, spec.seed, kind)

    evaluated = [
        load(
            source,
            "prompts",
            field=f"spec.evaluation.prompts[{i}]",
            base_dir=base_dir,
            cache_dir=cache_dir,
            seed=spec.seed,
            chat=chat,
        )
        for i, source in enumerate(spec.evaluation.prompts)
        if "prompts" in kinds
    ]
    collected = Collection(
        stage_data("demonstrations"),
        stage_data("preferences"),
        stage_data("prompts"),
        prints,
        cast(list[Records[Prompt]], evaluated),
    )
    compare(spec, base_dir, known or {}, prints)
    return collected


def _one_shape(spec: RLHFJobSpec, name: str, records: Records[Any], others: list[SourcePart[Any]]) -> None:
    """Raises DataError for labelled responses in a list that needs pairs or already has pairs."""
    labelled = isinstance(records[0], Labelled)
    if labelled and (Stage.REWARD in spec.stages or spec.dpo.loss != "KTO"):
        needs = "the reward stage" if Stage.REWARD in spec.stages else f"spec.dpo.loss {spec.dpo.loss}"
        raise DataError(
            f"{name} has one response and a label in each record, which only spec.dpo.loss KTO learns from, but "
            f"{needs} needs chosen and rejected replies"
        )
    if others and isinstance(others[0].records[0], Labelled) != labelled:
        raise DataError(
            f"{name} has {'labels' if labelled else 'pairs'}, but spec.data.preferences[0] has "
            f"{'pairs' if labelled else 'labels'}; give all sources of the list one shape"
        )


def _label(identity_key: str) -> str:
    return identity_key.rsplit("/", 1)[-1] if identity_key.startswith('["path"') else identity_key


def _reader(kind: DataKind, spec: RLHFJobSpec) -> str:
    if kind == "demonstrations" and Stage.SFT not in spec.stages:
        return "ppo (ptxCoef > 0)"
    if kind == "preferences" and Stage.DPO in spec.stages:
        return Stage.DPO.value
    return STAGE_OF[kind].value
