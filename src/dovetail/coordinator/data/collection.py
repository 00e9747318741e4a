"""All data of a job. Each list of sources is loaded, split between the stages, partly held out, and blended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from dovetail.coordinator.data.blend import Blend, Indices, hold_out, split
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.fingerprints import Fingerprint, compare, fingerprint
from dovetail.coordinator.data.records import STAGE_OF, Demonstration, Judged, Labelled, Prompt, Records
from dovetail.coordinator.data.sources import Rows, identity, load
from dovetail.coordinator.data.text.chat_template import ChatFormat
from dovetail.manifest.fixed_names import DataKind
from dovetail.manifest.types import RLHFJobSpec, Stage

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
