"""Chooses the pipeline schedule for training actor and critic, or one model alone. It does so before the first
iteration, and again with times that the trainers measured. The schedule is stored with each step, so a step that is run
again uses the same one.

`PPOStage` uses it only if there is a choice (`stored_schedule.applies`), because the search loads numba."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.coordinator.schedules.stored_schedule import StoredSchedule, encode, trained_layouts
from dovetail.coordinator.schedules.training_schedule import (
    PINS,
    Times,
    choose_dedicated,
    choose_schedule,
    mini_batches_together,
    pinned_families,
    placeable,
    rank_actions,
    shared_layouts,
    training_problem,
)
from dovetail.coordinator.store.store import KeyValues
from dovetail.manifest.checks.batching import batch_rules
from dovetail.manifest.types import RLHFJobSpec, Role, Stage
from dovetail.pipelines import (
    DEDICATED,
    Choice,
    DeadlockError,
    Family,
    ProblemError,
    Schedule,
    ScheduleProblem,
    SearchEffort,
    SearchInstance,
    Shape,
    document,
    evaluate,
    family_instance,
    family_of,
    find,
    lower_bound,
    serial_memory,
)
from dovetail.protocol.files.durable import write_json
from dovetail.protocol.files.machine_profile import Profile
from dovetail.protocol.messages import CommandResult
from dovetail.protocol.plan import Layout, Plan, divisions, same_batches
from dovetail.protocol.process.process_names import trainer_name

# Between iterations a schedule is replaced only if the new one is faster by this fraction. The ranks are divided
# between the models only for the same gain, because the job then keeps that division.
HYSTERESIS = 0.03
# A job also keeps its number of stages per rank. More stages send more messages, whose times are unknown without a
# profile. Without one, more stages must therefore be faster by this fraction.
MORE_MESSAGES = 0.01
# Published schedules with two stages per rank, built by rules. The report compares them even if no rank can hold two
# stages.
RIVALS = ("interleaved", "zb-v")
PROFILE = "profile.json"
SEARCH_SECONDS = 5.0
# A problem of so few passes is searched in plain Python, with a few rules. This takes so long a family.
SMALL_PASSES = 200
SMALL_SECONDS = 0.2
# The compiled search of a small problem may end at this fraction of those rules' makespan.
COMPILED_GAIN = 0.95
SPLIT_RECOMPUTES = "a split backward would recompute a layer's activations for every weight (spec.plan.recompute)"
SPLIT_GATHERS = "a layer's weights are not there any more for the second half of a split backward (spec.plan.zero3)"


@dataclass(frozen=True)
class KeptPlacement:
    """The placement that a run keeps. `reverse` says whether the critic's stages run in the opposite direction to the
    actor's. A rank holds `chunks` stages of each model. `own` has the layouts of models that have ranks of their own.
    `loop` is that of `Layout`."""

    reverse: bool
    chunks: int = 1
    own: Mapping[str, Layout] = field(default_factory=dict)
    loop: bool = False

    def layouts(self, plan: Plan, stage: Stage = Stage.PPO) -> dict[str, Layout]:
        """The layouts of the models that the stage trains."""
        return dict(self.own) or shared_layouts(trained_layouts(plan, stage), self.reverse, self.chunks, self.loop)


def stored_placement(records: KeyValues, stage: Stage = Stage.PPO) -> KeptPlacement | None:
    """The stage's placement in the store. None before its first choice."""
    kept = records.get(f"{stage.value}/placement")
    if not isinstance(kept, dict):
        return None
    own = {name: Layout.model_validate(layout) for name, layout in (kept.get("apart") or {}).items()}
    return KeptPlacement(bool(kept["reverse"]), int(kept.get("chunks") or 1), own, bool(kept.get("loop")))


def stored_layouts(records: KeyValues, plan: Plan) -> dict[str, Layout]:
    """The layouts of actor and critic that the run has stored. {} if they are where the plan puts them."""
    kept = stored_placement(records)
    return {} if kept is None else kept.layouts(plan)


class _Question(NamedTuple):
    """What a search is asked. `problem` has one stage a rank and the job's limit of memory, `free` has none. `counts`
    are the micro-batches of a mini-batch by model, `size` is their number on all ranks together."""

    problem: ScheduleProblem
    free: ScheduleProblem
    counts: dict[str, int]
    size: int
    in_bytes: bool

    @property
    def small(self) -> bool:
        passes = 3 * self.problem.mini_batches * sum(m.micro_batches for m in self.problem.models)
        return self.problem.ranks * passes <= SMALL_PASSES


class Scheduling:
    """Chooses among the schedule families that plan.intraStageFusion allows and that run on the placement of a stage of
    the job."""

    def __init__(
        self,
        spec: RLHFJobSpec,
        plan: Plan,
        records: KeyValues,
        run_dir: Path,
        log: Callable[..., None],
        stage: Stage = Stage.PPO,
    ) -> None:
        self._spec, self._plan, self._records, self._log = spec, plan, records, log
        self._stage, ppo = stage, stage is Stage.PPO
        self._path = run_dir / ("schedule.json" if ppo else f"schedule-{stage.value}.json")
        self._times = Times()
        self._recomputed = plan.recomputed(stage)
        self._times.expect(plan.activation_bytes if ppo else {}, self._recomputed)
        self._current: Schedule | None = None
        self._choosing: asyncio.Task[None] | None = None
        self._learned = 0
        # The best makespan of the last search, as a multiple of the lower bound: with a few rules, and compiled.
        self._reached: dict[bool, float] = {}
        self._report: dict[str, Any] = {}
        self._peak_bytes = 0.0
        self._seconds: list[float] = []
        self._kept: KeptPlacement | None = None
        self._plain = trained_layouts(plan, stage)
        self._all = pinned_families("Auto", len(self._plain))
        self._allowed = pinned_families(
            "Dedicated" if plan.dedicated and ppo else spec.plan.intra_stage_fusion, len(self._plain)
        )
        if (
            len(self._plain) > 1
            and spec.plan.intra_stage_fusion == "Auto"
            and plan.schedule in ("TimeSharing", "Serial")
        ):
            # The plan found no room on the GPUs for the other families.
            self._allowed = tuple(dict.fromkeys((*PINS["Serial"], *PINS[plan.schedule])))
        rows = (row for row in plan.batching if row.stage is stage)
        self._most_chunks = max(plan.chunks, spec.plan.chunks) if ppo else max((row.chunks for row in rows), default=1)
        if not ppo and self._most_chunks == 1:
            # The manifest pins a V-shaped schedule, but this stage's model has too few layers for it.
            self._allowed = self._all

    def _family(self, name: str) -> Family:
        return family_of(name, len(self._plain))

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the models."""
        return {} if self._kept is None else self._kept.layouts(self._plan, self._stage)

    @property
    def _unsplit(self) -> str:
        """The reason why no backward pass can be split. Empty if it can be split."""
        if self._recomputed:
            return SPLIT_RECOMPUTES
        return SPLIT_GATHERS if self._plan.gathered_by_layer(self._stage) else ""

    @property
    def _models_have_own_ranks(self) -> bool:
        """Whether each model has ranks of its own."""
        return self._kept is not None and bool(self._kept.own)

    async def begin(self) -> None:
        """Choose the first schedule. It decides on which ranks the critic's stages are, and the job keeps that
        placement. Raises ProblemError if no schedule fits."""
        self._kept = stored_placement(self._records, self._stage)
        self._assume()
        question = self._question(self._times)
        await asyncio.to_thread(self._choose, self._times, question, not question.small)
        assert self._kept is not None
        apart = {name: layout.model_dump() for name, layout in self._kept.own.items()}
        kept: dict[str, Any] = {"reverse": self._kept.reverse, "chunks": self._kept.chunks, "apart": apart}
        kept |= {"loop": True} if self._kept.loop else {}
        self._records.put(f"{self._stage.value}/placement", kept)

    async def current(self) -> StoredSchedule | None:
        """The schedule of the next iteration. None before the first choice. It does not wait for a search that is
        running. A later iteration uses its result. Raises what a finished search raised."""
        if self._choosing is not None and self._choosing.done():
            await self.close()
        current = self._current
        if current is None:
            return None
        lists = rank_actions(current, self.layouts)
        return StoredSchedule(current.family, current.instance.problem.mini_batches, encode(lists))

    def learn(self, result: CommandResult, left: int) -> None:
        """Take an iteration's measurements. `left`: the iterations or steps of the stage that are still to come. After
        iterations 1, 2, 4, 8, ... a search for a better schedule is considered, in the background: the first one is
        always made, the others if they may gain more time than they take (`_refine`). Each iteration adds less
        information, and a search takes a CPU core from the rollouts. Raises what a finished search raised."""
        if self._current is None or not result.times:
            return
        self._times.add(result.times, self.layouts)
        self._learned += 1
        self._peak_bytes = result.metrics.get("activation_peak_bytes", 0.0)
        self._seconds = [
            span.end - span.start
            for span in result.spans
            if span.process == trainer_name(0)
            and span.lane == "phases"
            and span.name.startswith(("mini-batch", f"{self._stage.value} step"))
        ]
        if self._choosing is not None and self._choosing.done():
            self._choosing.result()  # it raises here what the search raised, as in `current`
            self._choosing = None
        if self._choosing is None and self._learned.bit_count() == 1:
            self._choosing = asyncio.create_task(asyncio.to_thread(self._refine, copy.deepcopy(self._times), left))

    async def close(self) -> None:
        """Wait for a search that is running, so that the report has its result. Raises what the search raised."""
        if self._choosing is not None:
            choosing, self._choosing = self._choosing, None
            await choosing

    # ------------------------------------------------------------ choice

    def _assume(self) -> None:
        """Begin with the times in the run's profile.json (`dovetail run --profile`), if there is one that fits. Its
        passes were measured without activation checkpointing, on PPO's samples."""
        if self._recomputed or self._stage is not Stage.PPO:
            return
        try:
            profile = Profile.model_validate_json((self._path.parent / PROFILE).read_text(encoding="utf-8"))
            self._times.assume(profile, shared_layouts(self._plain, False), self._spec.ppo.micro_batch_size)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._log("schedule.profile_ignored", reason=str(error))

    def _runs(self, family: str) -> bool:
        """Whether a family runs on the job's placement."""
        assert self._kept is not None
        if self._models_have_own_ranks or family == DEDICATED.name:
            return self._models_have_own_ranks and family == DEDICATED.name
        return placeable(self._family(family), self._kept.reverse, self._kept.chunks, self._kept.loop)

    def _limited(self) -> bool:
        """Whether memory is limited. On GPUs, a job that fits when the models train one after the other must also fit
        when they train at once."""
        return any(Role.TRAINER in group.roles and not group.on_cpu for group in self._spec.groups)

    def _limit(self, problem: ScheduleProblem, in_bytes: bool) -> float | None:
        """The limit of activation memory, in the problem's units. It is the manifest's limit if the sizes are known in
        bytes. Otherwise, on GPUs, it is what serial 1F1B takes. None if the plan gave each model ranks of its own,
        where 1F1B fits."""
        given = self._spec.plan.activation_memory if self._stage is Stage.PPO else None
        if given is not None and in_bytes:
            return given * 2**30
        if self._plan.dedicated and self._stage is Stage.PPO:
            return None
        return serial_memory(problem) * (1 + 1e-6) if given is not None or self._limited() else None

    def _refine(self, times: Times, left: int) -> None:
        try:
            question = self._question(times)
            now = self._with(times, question)
            bound = 0.0 if now is None else self._bound(times, question)
            gain = self._expected_gain(now, bound, left, not question.small)
            searched = sum(not self._family(n).fixed for n in self._families(question))
            cost = SMALL_SECONDS * searched if question.small else SEARCH_SECONDS
            fits = now is None or now.fits(question.problem.memory_limit)
            if self._learned > 1 and gain <= cost and fits:
                self._keep(f"a search takes {cost:.1f} s and may save {gain:.1f} s")
            else:
                more = self._expected_gain(now, bound, left, compiled=True)
                self._choose(times, question, not question.small or more > SEARCH_SECONDS)
        except ProblemError as error:
            self._keep(str(error))

    def _keep(self, reason: str) -> None:
        """Keep the schedule. The report gets the last measurements."""
        self._log("schedule.kept", reason=reason)
        self._report |= self._measurements()
        write_json(self._path, self._report)

    def _with(self, times: Times, question: _Question) -> Schedule | None:
        """The current schedule with these times and sizes. None if each model has ranks of its own, where there is no
        other."""
        current = self._current
        if current is None or self._models_have_own_ranks:
            return None
        return evaluate(self._instance(current.family, times, question), current.orders)

    def _expected_gain(self, now: Schedule | None, bound: float, left: int, compiled: bool) -> float:
        """The seconds that the rest of the stage would be shorter than with `now`, if a search came as near to the
        lower bound as the last one of its kind did. 0 if that is too little to replace the schedule. It follows from
        the measured times alone, not from how long searches took."""
        if now is None:
            return 0.0
        reached = self._reached.get(compiled, max(1.0, COMPILED_GAIN * self._reached.get(False, 1.0)))
        fraction = 1 - reached * bound / now.makespan
        schedules = (
            self._spec.ppo.steps_per_iteration // now.instance.problem.mini_batches if self._stage is Stage.PPO else 1
        )
        return left * schedules * now.makespan * fraction if fraction > HYSTERESIS else 0.0

    def _bound(self, times: Times, question: _Question) -> float:
        """The shortest makespan that a schedule on the job's placement can have."""
        names = [n for n in self._families(question) if n in self._allowed and self._runs(n)]
        split = [n for n in names if not (self._unsplit and self._family(n).split)]
        return min((lower_bound(self._instance(n, times, question)) for n in split or names), default=0.0)

    def _instance(self, name: str, times: Times, question: _Question) -> SearchInstance:
        assert self._kept is not None
        family = replace(self._family(name), reverse=self._kept.reverse)
        return family_instance(self._posed(question, times, family.chunks), family)

    def _question(self, times: Times) -> _Question:
        spec = self._spec
        either = shared_layouts(self._plain, False)
        rule = next(rule for rule in batch_rules(spec) if rule.stage is self._stage)
        size = rule.batch // rule.micro
        counts = {name: size // layout.batch_shares for name, layout in either.items()}
        together = 1
        if len(either) > 1 and not spec.ppo.ptx_coef:
            together = mini_batches_together(spec.ppo.steps_per_iteration)
        free = training_problem(either, counts, together, times)
        in_bytes = times.complete("bytes", either, counts)
        problem = replace(free, memory_limit=self._limit(free, in_bytes))
        return _Question(problem, free, counts, size, in_bytes)

    def _choose(self, times: Times, question: _Question, compiled: bool) -> None:
        """Evaluate every family with the known times, and take the best one if it gains enough. `compiled`: search with
        the compiled kernels. Raises ProblemError if no schedule fits."""
        spec, problem, counts, limit = self._spec, question.problem, question.counts, question.problem.memory_limit
        effort = SearchEffort(
            SEARCH_SECONDS,
            time.monotonic,
            workers=1,
            scale=0.1,
            seed=spec.seed,
            memory=limit is None,
            compiled=compiled,
        )
        families = self._families(question)
        choice = self._evaluated(families, question, times, effort)
        split = [name for name in families if self._family(name).split] if self._unsplit else []
        choice.refused.update(dict.fromkeys(split, self._unsplit))
        own = self._dedicated(choice, times, question)
        can = [DEDICATED.name, *families]
        found = {n: s for n, s in choice.schedules.items() if n in self._allowed and n in can}
        if not found:
            raise ProblemError(
                f"spec.plan.intraStageFusion is {spec.plan.intra_stage_fusion}, but none of its schedules can run: "
                + "; ".join(dict.fromkeys(choice.refused.values()))
            )
        if self._kept is None:
            family = self._placement(found)
            own = own if family is DEDICATED else {}
            self._kept = KeptPlacement(family.reverse, family.chunks, own, family.shape is Shape.LOOP)
        here = {n: s for n, s in found.items() if self._runs(n)}
        if not here:
            # The schedules that fit now need the stages on other ranks, but a job keeps its placement.
            raise ProblemError(
                "no schedule can run where the job's stages are: " + "; ".join(dict.fromkeys(choice.refused.values()))
            )
        if not self._models_have_own_ranks:
            self._reached[compiled] = min(s.makespan for s in here.values()) / self._bound(times, question)
        if not times.profiled and not times.complete("B", shared_layouts(self._plain, False), counts):
            # The cost of a split backward pass is unknown until both kinds have run. So begin with whole backward
            # passes.
            here = {n: s for n, s in here.items() if not self._family(n).split} or here
        best = self._turned(min(here.values(), key=_rank), problem, effort)
        now = None if self._current is None else here.get(self._current.family)
        if self._current is None or now is None or best.makespan < now.makespan * (1 - HYSTERESIS):
            if self._current is None or best.family != self._current.family:
                self._log("schedule.chosen", family=best.family, makespan=best.makespan, measured=times.measured)
            self._current = best
        else:
            self._current = self._turned(now, problem, effort)
        self._write(choice, choose_schedule(question.free, ["serial"], effort, self._kept.reverse).best, question)

    def _families(self, question: _Question) -> list[str]:
        """The families to evaluate. Those that a pin leaves out are evaluated too, because the report compares them.
        Families with several stages per rank are left out if no rank can hold them."""
        most = max(self._most_chunks, 1 if self._kept is None else self._kept.chunks)
        pipelined = any(m.stages > 1 for m in question.problem.models)
        names = [*self._all, *self._allowed] if pipelined else list(PINS["Serial"])
        names = [n for n in dict.fromkeys(names) if n != DEDICATED.name]
        return [n for n in names if most % self._family(n).chunks == 0]

    def _evaluated(self, families: list[str], question: _Question, times: Times, effort: SearchEffort) -> Choice:
        """The best schedule of each family, or the reason why there is none. All families share the effort's seconds.
        Raises ProblemError if no schedule fits."""
        names = [n for n in families if not (self._unsplit and self._family(n).split)]
        schedules: dict[str, Schedule] = {}
        refused: dict[str, str] = {}
        placed = {n: (self._family(n).chunks, self._family(n).shape is Shape.LOOP) for n in names}
        # CP-SAT takes most of a search. It is worth that only if times are known, and only for families that can run.
        known = times.measured or times.profiled
        quick = {n for n in names if not known or n not in self._allowed or (self._kept and not self._runs(n))}
        for chunks, loop in sorted(set(placed.values())):
            mine = [n for n in names if placed[n] == (chunks, loop)]
            part = replace(effort, seconds=effort.seconds * len(mine) / len(names))
            try:
                posed = self._posed(question, times, chunks)
                found = choose_schedule(posed, mine, part, None, chunks, loop, quick)
            except ProblemError as error:
                refused.update(dict.fromkeys(mine, str(error)))
                continue
            schedules.update(found.schedules)
            refused.update(found.refused)
        if not schedules:
            raise ProblemError("; ".join(dict.fromkeys(refused.values())))
        best = min(schedules.values(), key=_rank)
        others = [n for n in RIVALS if len(families) > 1 and not (self._unsplit and self._family(n).split)]
        for name in (n for n in others if n not in schedules and n not in refused):
            with contextlib.suppress(ProblemError, DeadlockError):
                schedules[name] = find(self._posed(question, times, 2), self._family(name), effort)
        return Choice(best, schedules, refused)

    def _posed(self, question: _Question, times: Times, chunks: int) -> ScheduleProblem:
        """The same problem with `chunks` stages per rank."""
        problem = question.problem
        if chunks == 1:
            return problem
        layouts = shared_layouts(self._plain, False, chunks)
        return training_problem(
            layouts, question.counts, problem.mini_batches, times, memory_limit=problem.memory_limit
        )

    def _dedicated(self, choice: Choice, times: Times, question: _Question) -> dict[str, Layout]:
        """Add the schedule with ranks of its own for each model to `choice`, or the reason why there is none. Returns
        the layouts. Unless the manifest pins this schedule, it is considered only if it changes neither the
        micro-batches nor, on GPUs, what the ranks hold."""
        shared = self._plain
        if len(shared) == 1:
            return {}
        if self._models_have_own_ranks:
            found = [self.layouts]
        elif self._plan.dedicated:
            found = [self._plan.dedicated]
        else:
            found = divisions(shared, question.size)
            if self._spec.plan.intra_stage_fusion != "Dedicated":
                found = [each for each in found if same_batches(shared, each)]
        whole = math.lcm(shared["actor"].pp, shared["critic"].pp)
        try:
            together, limit = question.problem.mini_batches, question.problem.memory_limit
            schedule, layouts = choose_dedicated(found, question.size, together, times, whole, limit)
        except ProblemError as error:
            choice.refused[DEDICATED.name] = str(error)
            return {}
        choice.schedules[DEDICATED.name] = schedule
        return layouts

    def _placement(self, found: dict[str, Schedule]) -> Family:
        """The family that decides where the stages are. A family with more stages per rank, or with dedicated ranks, is
        taken only if it gains enough."""
        own = found.get(DEDICATED.name)
        shared = sorted(
            (s for s in found.values() if s is not own), key=lambda s: (self._family(s.family).chunks, _rank(s))
        )
        margin = 1e-6 if self._times.profiled else MORE_MESSAGES
        best: Schedule | None = None
        for each in shared:
            more = best is not None and self._family(each.family).chunks > self._family(best.family).chunks
            if best is None or _rank(each)[0] < _rank(best)[0] * (1 - margin * more):
                best = each
        if own is not None and (
            best is None or not (self._limited() or own.makespan > best.makespan * (1 - HYSTERESIS))
        ):
            best = own
        assert best is not None
        return self._family(best.family)

    def _turned(self, found: Schedule, problem: ScheduleProblem, effort: SearchEffort) -> Schedule:
        """`found` for the direction in which the stages are placed. Only a serial schedule can run in both
        directions."""
        assert self._kept is not None
        if self._models_have_own_ranks or found.instance.placement.reverse == self._kept.reverse:
            return found
        return choose_schedule(problem, [found.family], effort, self._kept.reverse).best

    # ------------------------------------------------------------ report

    def _write(self, choice: Choice, serial: Schedule, question: _Question) -> None:
        """Write schedule.json for the report. It has the time and memory of every family, and the timelines before and
        after. `memory_limit` is the job's. That of the chosen schedule may be less, because families such as V-Half
        have their own."""
        current = self._current
        assert current is not None
        self._report = {
            "chosen": current.family,
            "pinned": self._spec.plan.intra_stage_fusion,
            "measured": self._times.measured,
            "profiled": self._times.profiled,
            "communication": float(current.instance.problem.latencies.max()),
            "mini_batches": current.instance.problem.mini_batches,
            "speedup": serial.makespan / current.makespan,
            "serial_memory": serial.peak,
            "memory": current.peak,
            "memory_limit": question.problem.memory_limit,
            "in_bytes": question.in_bytes,
            **self._measurements(),
            "families": {
                name: {
                    "makespan": found.makespan,
                    "peak": found.peak,
                    "description": family.description,
                    "published": family.published,
                    "runs_here": name in self._allowed and self._runs(name),
                }
                for name, found in choice.schedules.items()
                for family in [self._family(name)]
            },
            "refused": choice.refused,
            "before": document(serial),
            "after": document(current),
        }
        write_json(self._path, self._report)

    def _measurements(self) -> dict[str, float | None]:
        """What the last iteration measured, for the report."""
        seconds = statistics.median(self._seconds) if self._seconds else None
        return {"measured_peak_bytes": self._peak_bytes, "measured_seconds": seconds}


def _rank(schedule: Schedule) -> tuple[float, float]:
    return float(f"{schedule.makespan:.6g}"), schedule.peak


class StageSchedules(Scheduling):
    """The schedules of a stage's steps. The store keeps the first step of each schedule, so a step that is run again
    has the same one."""

    async def decide(self, step: int) -> None:
        """Decide the schedule of a step that has not run yet. Raises what a finished search raised."""
        known = self._known()
        current = await self.current()
        if current is not None and (not known or known[-1][1] != current.as_json()):
            self._records.put(self._key, [*(each for each in known if each[0] < step), [step, current.as_json()]])

    def of(self, step: int) -> dict[str, Any] | None:
        """The schedule that was decided for a step, as `StoredSchedule.as_json` makes it. None stands for the serial
        one."""
        return next((schedule for first, schedule in reversed(self._known()) if first <= step), None)

    @property
    def _key(self) -> str:
        return f"{self._stage.value}/schedules"

    def _known(self) -> list[tuple[int, dict[str, Any]]]:
        return [(int(first), schedule) for first, schedule in self._records.get(self._key) or []]
