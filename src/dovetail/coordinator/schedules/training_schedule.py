"""Makes the schedule of a job's training, of actor and critic together or of one model. It states the problem from
layouts, batches and measured times, chooses a family of schedules, and makes the lists of actions that the trainer
ranks run."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.coordinator.schedules.stage_times import stage_times, transfer_seconds
from dovetail.manifest.sizes import world_size
from dovetail.manifest.types import Parallelism
from dovetail.pipelines import (
    ALONE,
    CHUNKED,
    DEDICATED,
    FAMILIES,
    Choice,
    Family,
    Floats,
    ModelPipelines,
    ProblemError,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    Shape,
    check_steps,
    choose,
    dedicated_schedule,
    family_names,
    family_of,
    find,
    steps,
)
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.messages import Action, StageTimes
from dovetail.protocol.plan import Coordinates, Layout, coordinates, holds, rank_at, stages_at

# The extra time of a split backward pass, as a fraction of the whole backward pass, if it was not measured.
SPLIT_OVERHEAD = 0.1
# The fraction of a split backward pass that is the first stage's input gradient. It is almost 0, because no stage waits
# for that gradient and it is not computed.
NO_INPUT_GRADIENT = 1e-3
# The fraction of a split backward pass that is its first half, if it was not measured.
EARLY = 0.5
MAX_MINI_BATCHES = 6
PINS = {
    "Auto": (*FAMILIES, *CHUNKED, DEDICATED.name),
    "Fused": tuple(name for name in FAMILIES if name.startswith("fused")),
    "TimeSharing": tuple(name for name in FAMILIES if name.startswith(("stitched", "shared"))),
    "VShaped": tuple(f.name for f in CHUNKED.values() if f.chunks == 2 and f.shape is Shape.ZIGZAG),
    "Dedicated": (DEDICATED.name,),
    "Serial": ("serial",),
}
"""The families of actor and critic that each value of plan.intraStageFusion allows."""


def pinned_families(pin: str, models: int) -> tuple[str, ...]:
    """The families that the trainers can run and that a value of plan.intraStageFusion allows for `models` models. If a
    value makes no sense for one model, it allows what Auto allows."""
    if models > 1 or pin == "Serial":
        return PINS[pin]
    in_v = tuple(f.name for f in ALONE.values() if f.chunks == 2 and f.shape is Shape.ZIGZAG)
    return in_v if pin == "VShaped" else tuple(ALONE)


def shared_layouts(
    layouts: Mapping[str, Parallelism], reverse: bool, chunks: int = 1, loop: bool = False
) -> dict[str, Layout]:
    """The layouts of the models on the positions that they share. With `reverse` the critic's stages are in the
    opposite order. A rank holds `chunks` stages of each model. `loop` is that of `Layout`. A model that trains alone
    uses only these two.

    Raises ValueError unless the models have the same ranks and the same tp."""
    if len(layouts) == 1:
        return {name: _placed(at, chunks, loop) for name, at in layouts.items()}
    actor, critic = layouts["actor"], layouts["critic"]
    if world_size(actor) != world_size(critic) or actor.tp != critic.tp:
        raise ValueError(
            f"actor (pp {actor.pp} x dp {actor.dp} x tp {actor.tp}) and critic (pp {critic.pp} x dp {critic.dp} x tp "
            f"{critic.tp}) must share the same ranks and tp to train on one schedule"
        )
    positions = math.lcm(actor.pp, critic.pp)

    def placed(layout: Parallelism, reverse: bool) -> Layout:
        return _placed(layout, chunks, loop, positions // layout.pp, reverse)

    return {"actor": placed(actor, False), "critic": placed(critic, reverse)}


def _placed(layout: Parallelism, chunks: int, loop: bool, pipelines: int = 1, reverse: bool = False) -> Layout:
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    return Layout(**sizes, pipelines=pipelines, reverse=reverse, chunks=chunks, loop=loop)


def mini_batches_together(optimizer_steps: int) -> int:
    """The number of mini-batches that one schedule holds. It is the largest divisor of `optimizer_steps` up to
    MAX_MINI_BATCHES."""
    return max(n for n in range(1, MAX_MINI_BATCHES + 1) if optimizer_steps % n == 0)


class Times:
    """The known times of each stage. Measured times come first, then those of a profile if there is one. Without either
    the defaults are used: a forward pass takes 1, a backward pass 2, and a message no time."""

    def __init__(self) -> None:
        # By model, pipeline, stage (over the chunks of all its ranks), copy, and kind of pass or `bytes`.
        self._known: dict[tuple[str, int, int, int, str], list[float]] = {}
        self._transfers: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
        self._profile: Profile | None = None
        self._micro_batch = 0
        self._profiled_transfer = 0.0
        self._measured: dict[str, Layout] = {}
        self._sizes: dict[str, list[int]] = {}
        self.again: frozenset[str] = frozenset()

    @property
    def measured(self) -> bool:
        """Whether anything was measured in this job."""
        return bool(self._known)

    @property
    def profiled(self) -> bool:
        """Whether there is a profile."""
        return self._profile is not None

    def assume(self, profile: Profile, layouts: Mapping[str, Parallelism], micro_batch: int) -> None:
        """Use a profile's times of micro-batches of `micro_batch` sequences.

        Raises ProblemError if the profile lacks a model, or has fewer layers than the layout has stages."""
        for name, layout in layouts.items():
            if name not in profile.models:
                raise ProblemError(f"the profile has no {name}, only {', '.join(profile.models)}; measure it")
            stage_times(name, profile.models[name], layout.pp, micro_batch)
        self._profile, self._micro_batch = profile, micro_batch
        self._profiled_transfer = max(transfer_seconds(profile, name, micro_batch) for name in layouts)

    def expect(self, sizes: Mapping[str, Sequence[int]], again: Sequence[str] = ()) -> None:
        """Use these bytes of a micro-batch's activations if they are neither measured nor profiled. `sizes` has for
        each model the bytes of each rank's stage, or of each of its chunks (`Plan.activation_bytes`). `again` names the
        models with activation checkpointing (`Plan.recomputed`)."""
        self._sizes = {model: list(each) for model, each in sizes.items()}
        self.again = frozenset(again)

    def add(self, times: Sequence[StageTimes], layouts: Mapping[str, Layout]) -> None:
        """Take in measurements. A new value counts as much as all earlier ones, so that one odd value counts for
        little. All measurements of a job must have the same layouts."""
        for part in times:
            layout = self._measured[part.model] = layouts[part.model]
            place = coordinates(part.rank, layout)
            width = layout.dp // layout.pipelines
            pipeline, copy = divmod(place.dp, width)
            stage = stages_at(place.pp, layout.pp, layout.chunks, layout.loop)[part.chunk]
            key = (part.model, pipeline, stage, copy)
            for kind, values in part.seconds.items():
                old = self._known.get((*key, kind), values)
                mixed = [(a + b) / 2 for a, b in zip(old, values, strict=True)] if len(old) == len(values) else values
                self._known[*key, kind] = mixed
            self._known[*key, "bytes"] = part.activation
            if part.transfer is not None:
                onward = rank_at(place._replace(pp=place.pp + 1), layout)
                edge = sorted(_position(rank, part.model, layouts) for rank in (part.rank, onward))
                known = self._transfers.setdefault((edge[0], edge[1]), {})
                known[part.model, copy] = (part.transfer + known.get((part.model, copy), part.transfer)) / 2

    def array(self, model: str, kind: str, layout: Layout, count: int, mini_batches: int) -> Floats | None:
        """The seconds of a kind of pass, or its `bytes`, (pipelines, stages, micro-batches of all mini-batches)
        float64. The slowest copy counts. None if a stage was neither measured nor profiled.

        `count` is the number of micro-batches of a mini-batch. If the measurements have another layout, they are
        converted. If only the number of stages on a rank differs, they are added up or divided evenly. Otherwise the
        same work is divided evenly over stages and micro-batches."""
        stages = layout.pp * layout.chunks
        measured = self._measured.get(model)
        if measured is not None and _cut(measured) != _cut(layout):
            # The number of micro-batches of a mini-batch in the measurements.
            number = next((len(v) for key, v in self._known.items() if (key[0], key[4]) == (model, kind)), None)
            other = None if number is None else self.array(model, kind, measured, number, 1)
            if number is not None and other is not None:
                alike = number == count and _cut(measured)[:2] == _cut(layout)[:2]
                shape = layout.pipelines, stages, count
                half = None if kind not in "IW" else self.array(model, "W" if kind == "I" else "I", measured, number, 1)
                if half is None:
                    return np.tile(_spread(other, shape, alike), mini_batches)
                first, second = (other, half) if kind == "I" else (half, other)
                halves = _halves(_spread(first + second, shape, alike), _early(first, second))
                return np.tile(halves["IW".index(kind)], mini_batches)
            assumed = self._assumed(model, kind, layout, count)
            return None if assumed is None else np.tile(assumed, mini_batches)
        result = np.zeros((layout.pipelines, stages, count))
        for k in range(layout.pipelines):
            for stage in range(stages):
                found = [self._known.get((model, k, stage, d, kind)) for d in range(layout.dp // layout.pipelines)]
                known = [values for values in found if values is not None and len(values) == count]
                if len(known) < len(found):
                    assumed = self._assumed(model, kind, layout, count)
                    return None if assumed is None else np.tile(assumed, mini_batches)
                result[k, stage] = np.max(np.array(known), axis=0)
        return np.tile(result, mini_batches)

    def _assumed(self, model: str, kind: str, layout: Layout, count: int) -> Floats | None:
        """The profile's value. Without a profile, bytes are those of the plan. For a model that was measured here, the
        profile only tells how its backward pass is divided into halves."""
        if self._profile is None:
            sizes = np.array(self._sizes.get(model, []), dtype=np.float64)
            if kind != "bytes" or not len(sizes):
                return None
            stages = layout.pp * layout.chunks
            if len(sizes) % layout.pp:
                sizes = np.full(stages, sizes.sum() / stages)
            return np.tile(_regrouped(sizes[None, :, None], stages), (layout.pipelines, 1, count))
        each = stage_times(model, self._profile.models[model], layout.pp * layout.chunks, self._micro_batch)
        if any(key[0] == model for key in self._known):
            whole = self.array(model, "B", layout, count, 1) if kind in "IW" else None
            return None if whole is None else whole * (each[kind] / each["B"])[None, :, None]
        return np.tile(each[kind][None, :, None], (layout.pipelines, 1, count))

    def complete(self, kind: str, layouts: Mapping[str, Layout], counts: Mapping[str, int]) -> bool:
        """Whether `array` knows this kind for all models. `counts` has the number of micro-batches of a mini-batch, by
        model."""
        return all(self.array(m, kind, layouts[m], counts[m], 1) is not None for m in layouts)

    def communication(self, positions: int, apart: bool = False) -> float | Floats:
        """The seconds of a message from position to position, (N, N) float64, of the slower model. It is one number if
        messages were not measured. `apart` says that the models have ranks of their own."""
        if not self._transfers:
            return self._profiled_transfer
        slowest = {edge: max(found.values()) for edge, found in self._transfers.items()}
        if apart != any(layout.first for layout in self._measured.values()):
            return max(slowest.values())
        result = np.full((positions, positions), max(slowest.values()))
        for (a, b), seconds in slowest.items():
            result[a, b] = result[b, a] = seconds
        return result


def training_problem(
    layouts: Mapping[str, Layout],
    micro_batches: Mapping[str, int],
    mini_batches: int,
    times: Times | None = None,
    *,
    communication: float | None = None,
    memory_limit: float | None = None,
    whole: float | None = None,
) -> ScheduleProblem:
    """The schedule problem of the models of `layouts`, which are actor and critic or one model.

    `micro_batches[model]` is the number of micro-batches of one rank and mini-batch. `communication` is the seconds of
    a message. By default it comes from `times`. A rank may hold at most `memory_limit` bytes of activations. `whole` is
    the time of a whole model's forward pass if no times are known. By default it is the number of positions. Raises
    ProblemError if the numbers do not fit together."""

    known = times or Times()
    sizes, sized = known, known.complete("bytes", layouts, micro_batches)
    if not known.complete("F", layouts, micro_batches):
        known = Times()  # seconds of one model must not be mixed with defaults of the other

    def model(name: str) -> ModelPipelines:
        layout, count = layouts[name], micro_batches[name]

        def values(kind: str) -> Floats | None:
            return known.array(name, kind, layout, count, mini_batches)

        shape = (layout.pipelines, layout.pp * layout.chunks, count * mini_batches)
        forward = values("F")
        # A model with fewer stages has longer ones.
        unit = (positions if whole is None else whole) / layout.pp / layout.chunks
        least = 1e-9 if forward is not None else 1e-3
        forward = np.full(shape, unit) if forward is None else np.maximum(forward, least)
        both, first, second = values("B"), values("I"), values("W")
        if first is not None and second is not None:
            halves = np.maximum(first, least), np.maximum(second, least)
            if both is None:
                both = (halves[0] + halves[1]) / (1 + SPLIT_OVERHEAD)
        else:
            both = (3 if name in sizes.again else 2) * forward if both is None else np.maximum(both, least)
            longer = both * (1 + SPLIT_OVERHEAD)
            halves = _halves(longer, EARLY)
        size = sizes.array(name, "bytes", layout, count, mini_batches) if sized else None
        return ModelPipelines(
            name,
            layout.pp,
            count,
            forward,
            np.maximum(both, least),
            np.full(shape, unit) if size is None else size,
            layout.pipelines,
            *halves,
            first=_offset(name, layouts),
            parts=layout.chunks,
        )

    apart = _apart(layouts)
    positions = sum(layout.pp * layout.pipelines for layout in layouts.values()) // (1 if apart else len(layouts))
    latency = known.communication(positions, apart) if communication is None else communication
    return ScheduleProblem(tuple(model(name) for name in layouts), latency, mini_batches, memory_limit)


def profiled_problem(
    profile: Profile,
    stages: tuple[int, int],
    micro_batches: int,
    micro_batch: int,
    *,
    mini_batches: int = 1,
    memory_limit: float | None = None,
) -> ScheduleProblem:
    """The schedule problem of actor and critic with a profile's times, in seconds and bytes.

    `stages` has the numbers of pipeline stages of actor and critic. An actor pipeline has `micro_batches` micro-batches
    in a mini-batch, with `micro_batch` sequences each. Those of the critic follow from K1 * M1 = K2 * M2, where K is
    the number of pipelines. Raises ProblemError for numbers that do not fit, and for times that were not measured."""
    ranks, layouts, counts = max(stages), {}, {}
    total = ranks // stages[0] * micro_batches
    for name, pp in zip(("actor", "critic"), stages, strict=True):
        if ranks % pp:
            raise ProblemError(f"the {name}'s {pp} pipeline stages do not divide {ranks}")
        pipelines = ranks // pp
        if total % pipelines:
            raise ProblemError(
                f"{total} micro-batches cannot be divided among the {name}'s {pipelines} pipelines of {pp} stages"
            )
        layouts[name], counts[name] = Layout(pp=pp, dp=pipelines, pipelines=pipelines), total // pipelines
    times = Times()
    times.assume(profile, layouts, micro_batch)
    return training_problem(layouts, counts, mini_batches, times, memory_limit=memory_limit)


def choose_schedule(
    problem: ScheduleProblem,
    families: Sequence[str],
    effort: SearchEffort,
    reverse: bool | None = None,
    chunks: int = 1,
    loop: bool = False,
    quick: Container[str] = (),
) -> Choice:
    """The fastest schedule of `families` that fits. Only families whose critic runs in the direction `reverse` are
    taken, or any family if it is None. A serial schedule runs both ways. Each rank holds `chunks` stages of a model.
    `loop` is that of `Layout`. For the families in `quick` nothing is proved, and no schedule with less memory is
    searched. Raises ProblemError if none fits."""
    known = [n for n in family_names(problem, chunked=True) if n in families]
    models = len(problem.models)
    names = [n for n in known if placeable(family_of(n, models), reverse, chunks, loop)]

    def finder(_: ScheduleProblem, name: str, share: SearchEffort) -> Schedule:
        family = family_of(name, models)
        if name in quick:
            share = replace(share, memory=False, exact=False)
        # A serial schedule is the same both ways. It takes the direction of the ranks.
        return find(problem, replace(family, reverse=bool(reverse)) if is_serial(family) else family, share)

    return choose(problem, effort, names, finder)


def choose_dedicated(
    divisions: Sequence[Mapping[str, Layout]],
    micro_batches: int,
    mini_batches: int,
    times: Times,
    whole: float,
    memory_limit: float | None = None,
) -> tuple[Schedule, dict[str, Layout]]:
    """The schedule of the fastest of `divisions` that fits, and that division. Raises ProblemError if none fits.

    `divisions` are as `dovetail.protocol.plan.divisions` makes them. `micro_batches` is the number of
    micro-batches of a mini-batch on all ranks together. `whole` is that of `training_problem`."""
    found, reasons = [], ["there are too few ranks for either to have some alone"]
    for layouts in divisions:
        counts = {name: micro_batches // layout.batch_shares for name, layout in layouts.items()}
        try:
            problem = training_problem(layouts, counts, mini_batches, times, memory_limit=memory_limit, whole=whole)
            found.append((dedicated_schedule(problem), dict(layouts)))
        except ProblemError as error:
            reasons.append(str(error))
    if not found:
        raise ProblemError(reasons[-1])
    return min(found, key=lambda each: (round(each[0].makespan, 9), each[0].peak))


def is_serial(family: Family) -> bool:
    """Whether the models of this family run one after the other. Then the direction of the stages does not matter."""
    return family.name in ("serial", "zero-bubble")


def placeable(family: Family, reverse: bool | None, chunks: int = 1, loop: bool = False) -> bool:
    """Whether the trainers can run the family with this placement. `reverse` is the direction of the critic's stages,
    or None for any. Each rank holds `chunks` stages of a model, placed in a `loop` or not."""
    if family is DEDICATED or family.chunks != chunks or (family.shape is Shape.LOOP) != loop:
        return False
    return reverse is None or is_serial(family) or family.reverse == reverse


def _cut(layout: Layout) -> tuple[int, int, int]:
    """The sizes that decide which layers and which samples a rank has."""
    return layout.pp, layout.dp, layout.chunks


def _regrouped(values: Floats, stages: int) -> Floats:
    """Converts `values`, (pipelines, other stages, micro-batches), to `stages` stages. Values are divided evenly, and
    neighbours are added up."""
    number = values.shape[1]
    fine = math.lcm(number, stages)
    shares = np.repeat(values, fine // number, axis=1) / (fine // number)
    found: Floats = shares.reshape(values.shape[0], stages, fine // stages, -1).sum(axis=2)
    return found


def _spread(values: Floats, shape: tuple[int, int, int], alike: bool) -> Floats:
    """Converts `values`, (pipelines, other stages, other micro-batches), to the pipelines, stages and micro-batches of
    `shape`. `alike` says that only the number of stages differs. Otherwise the same work is divided evenly."""
    return _regrouped(values, shape[1]) if alike else np.full(shape, float(values.sum(axis=1).mean()) / shape[1])


def _early(first: Floats, second: Floats) -> float:
    """The fraction of split backward passes that is the first half, in all stages after the first."""
    whole = float((first + second)[:, 1:].sum())
    return float(first[:, 1:].sum()) / whole if whole else EARLY


def _halves(whole: Floats, early: float) -> tuple[Floats, Floats]:
    """Divides backward passes of `whole` seconds, (pipelines, stages, micro-batches), into both halves. `early` is the
    fraction of the first half."""
    share = np.full(whole.shape, early)
    share[:, 0, :] = NO_INPUT_GRADIENT
    return whole * share, whole * (1 - share)


def rank_actions(schedule: Schedule, layouts: Mapping[str, Layout]) -> list[list[Action]]:
    """The actions of every trainer rank, in order. Raises ScheduleError unless the schedule is legal."""
    check_steps(schedule.instance.problem, steps(schedule))
    by_position: list[list[Action]] = [[] for _ in range(schedule.instance.ranks)]
    for p in schedule.passes():
        chunk = p.stage // layouts[p.model].pp
        by_position[p.rank].append(Action(model=p.model, micro_batch=p.micro_batch, kind=p.kind, chunk=chunk))  # type: ignore[arg-type]
    if not _apart(layouts):
        width = world_size(next(iter(layouts.values()))) // len(by_position)
        for model in layouts.values():
            _check_places(model, width)
    world = max(layout.first + world_size(layout) for layout in layouts.values())
    owner = {rank: name for name, layout in layouts.items() for rank in range(world) if holds(rank, layout)}
    return [by_position[_position(rank, owner[rank], layouts)] for rank in range(world)]


def _apart(layouts: Mapping[str, Layout]) -> bool:
    """Whether each model has ranks of its own."""
    return any(layout.first for layout in layouts.values())


def _offset(model: str, layouts: Mapping[str, Layout]) -> int:
    """The model's first position. If the critic has ranks of its own, its positions come after the actor's."""
    return layouts["actor"].pp * layouts["actor"].pipelines if layouts[model].first else 0


def _position(rank: int, model: str, layouts: Mapping[str, Layout]) -> int:
    """The position of a trainer rank in a schedule."""
    layout = layouts[model]
    return _offset(model, layouts) + (rank - layout.first) // (layout.dp // layout.pipelines * layout.tp)


def _check_places(layout: Layout, width: int) -> None:
    """Check that position x of the schedule holds stage x % pp of pipeline x // pp, as `coordinates` says. With
    `reverse` the stages are in the opposite order. Raises ValueError."""
    for position in range(layout.pp * layout.pipelines):
        pipeline, stage = divmod(position, layout.pp)
        stage = layout.pp - 1 - stage if layout.reverse else stage
        place = Coordinates(stage, pipeline * (layout.dp // layout.pipelines), 0)
        if rank_at(place, layout) != position * width:
            raise ValueError(f"layout {layout} does not put position {position} of a schedule where it should be")
