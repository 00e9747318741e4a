"""The search for the fastest placement that fits: bounds and a beam, then a descent.

Structures (who gets which GPUs) are ranked by their tasks' fastest layouts, each taken alone. In that order, the best
few combinations of layouts of each are estimated as whole iterations, until no structure left can be faster, the
effort is spent, or time is up. Last, the best one's layouts and sizes are varied one at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product

from dovetail.planner.iteration.estimate import Estimate
from dovetail.planner.placement.candidate import INFERENCE, TASKS, TRAINING, Candidate, Placement, Schedule, Share, Task
from dovetail.planner.placement.costs import Estimator, Option
from dovetail.planner.placement.inventory import Inventory, Pool
from dovetail.planner.placement.limits import MICRO_BATCHES, Limits
from dovetail.planner.placement.ranking import Ranker, Ranking, combinations, frugality
from dovetail.planner.placement.structures import Sizes, Slot, Structure, every_size, sizes, structures
from dovetail.planner.placement.workload import Workload

# Combinations of a structure's layouts that are estimated.
COMBINATIONS = 8
# Combinations that are looked at for those.
PATIENCE = 500
GLANCES = 3
# The descent looks at layouts that alone take up to so much longer than the one in use.
SLACK = 1.25
# Pairs of layouts of actor and critic that it looks at.
PAIRS = 24
# Nodes by which the sizes of the best structure are varied, where not all were tried.
NEAR = 3


@dataclass(frozen=True)
class Effort:
    """`estimates`: of whole iterations, at most. `expired`: asked between them, True ends the search early."""

    estimates: int = 1500
    expired: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Found:
    """A candidate with its estimate."""

    candidate: Candidate
    estimate: Estimate
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass(frozen=True)
class Rejected:
    """The best of its kind of placement: slower than the plan (`seconds`), or it does not fit (`problem`)."""

    placement: Placement
    note: str
    seconds: float | None = None
    problem: str | None = None
    candidate: Candidate | None = None


@dataclass
class Result:
    """`best` None: nothing fits. `complete`: the search ended by itself, neither time nor effort were up."""

    best: Found | None = None
    rejected: list[Rejected] = field(default_factory=list)
    estimates: int = 0
    structures: int = 0
    complete: bool = True


class Search:
    """One search. Deterministic if `effort.expired` is. `accept`: which structures are looked at at all."""

    def __init__(
        self,
        inventory: Inventory,
        workload: Workload,
        limits: Limits,
        costs: Estimator,
        effort: Effort,
        lean: bool = True,
        accept: Callable[[Structure], bool] = lambda structure: True,
    ) -> None:
        self.inventory, self.workload, self.limits = inventory, workload, limits
        self.costs, self.effort, self.accept = costs, effort, accept
        self.ranker = Ranker(inventory, workload, limits, costs, lean)
        self.result = Result()
        self._known: dict[Candidate, Estimate] = {}
        self._kinds: dict[tuple[Placement, str], Rejected] = {}

    def run(self) -> Result:
        """The best of all structures."""
        best = self._round(sizes, 0.6)
        if best is not None and not self._over():
            best = self._round(partial(_near, self._cuts(best.structure)), 0.8, best)
        if best is not None:
            self._descend(best)
        self.result.complete = not self._over()
        found = self.result.best
        chosen = None if found is None else (found.candidate.placement, found.note)
        others = [r for key, r in self._kinds.items() if key != chosen]
        self.result.rejected = sorted(others, key=lambda r: (r.seconds is None, r.seconds or 0.0, r.placement, r.note))
        return self.result

    def _round(self, grid: Sizes, until: float, best: Ranking | None = None) -> Ranking | None:
        """One estimate of each structure, then a closer look at those that did best, until this share of the effort is
        spent; longer only where nothing fits yet."""
        begun, glanced = self.result.estimates, []
        for order, ranking in enumerate(sorted(self._ranked(grid), key=lambda r: r.guess)):
            if self._over() or self._spent(begun, until / 2):
                break
            if self.result.best is None or ranking.bound < self.result.best.seconds:
                seconds, improved = self._glance(ranking)
                best = ranking if improved else best
                glanced.append((seconds, order, ranking))
        for _, _, ranking in sorted(glanced, key=lambda g: g[:2]):
            if self._over() or self._spent(0, until):
                break
            best = self._beam(ranking) or best
        return best

    def _spent(self, begun: int, share: float) -> bool:
        return self.result.best is not None and self.result.estimates - begun >= share * self.effort.estimates

    def _glance(self, ranking: Ranking) -> tuple[float, bool]:
        """Seconds of the structure's first combination that fits, infinite if none of a few does, and whether it is the
        best so far; with the schedule and threshold that are the likeliest to be fast."""
        before = self.result.best
        for chosen in (*islice(self._agreeing(ranking), GLANCES), self._least(ranking)):
            if chosen is None or self._over():
                break
            schedule = self.schedules(ranking.structure, ranking.places, chosen)[-1]
            migration = self.limits.migrations[len(self.limits.migrations) // 2]
            candidate = replace(self.candidate(ranking, chosen, schedule), migration=migration)
            found = self.estimated(candidate, ranking.structure.note)
            if found.estimate.problem is None:
                return found.seconds, self.result.best is not before
        return float("inf"), False

    def _over(self) -> bool:
        return self.result.estimates >= self.effort.estimates or self.effort.expired()

    # ------------------------------------------------------------ structures

    def _ranked(self, grid: Sizes) -> list[Ranking]:
        found = []
        for structure in filter(self.accept, structures(self.inventory, self.workload, self.limits, grid)):
            self.result.structures += 1
            ranking = self.ranker.rank(structure)
            if isinstance(ranking, Ranking):
                found.append(ranking)
            else:
                self._kind(Rejected(structure.placement, structure.note, problem=ranking))
            if self.effort.expired():
                break
        return found

    # ------------------------------------------------------------ combinations

    def _beam(self, ranking: Ranking) -> Ranking | None:
        """Estimate the structure's best combinations; the ranking if the result got better."""
        best = self.result.best
        if best is not None and ranking.bound >= best.seconds:
            return None
        improved, fits = False, False
        for chosen in islice(self._agreeing(ranking), COMBINATIONS):
            if self._over():
                break
            better, fit = self._try(ranking, chosen)
            improved, fits = improved or better, fits or fit
        least = self._least(ranking)
        if not fits and least is not None and not self._over():
            improved = self._try(ranking, least)[0] or improved
        return ranking if improved else None

    def _agreeing(self, ranking: Ranking) -> Iterator[tuple[Share, ...]]:
        return (c for c in islice(combinations(ranking.layouts), PATIENCE) if self.agrees(ranking, c))

    def _least(self, ranking: Ranking) -> tuple[Share, ...] | None:
        """What needs least of each task's GPUs, and so fits if anything does; of each micro-batch size the same."""
        for micro in (None, *MICRO_BATCHES):
            chosen = []
            for (task, _), ranked in zip(ranking.places, ranking.layouts, strict=True):
                mine = [o for o in ranked if micro is None or task not in TRAINING or o.share.micro_batch == micro]
                if mine:
                    chosen.append(min(mine, key=frugality).share)
            if len(chosen) == len(ranking.places) and self.agrees(ranking, chosen):
                return tuple(chosen)
        return None

    def agrees(self, ranking: Ranking, chosen: Sequence[Share]) -> bool:
        """Whether a combination can run: a manifest has one micro-batch size for actor and critic, and inference takes
        whole servers."""
        if not self.limits.together:
            return True
        placed = list(zip(ranking.places, chosen, strict=True))
        sizes = {share.pool: share.tp for (task, _), share in placed if task == "generation"}
        whole = all(slot.count % sizes.get(slot.pool, 1) == 0 for (task, slot), _ in placed if task in INFERENCE)
        return whole and len({share.micro_batch for (task, _), share in placed if task in TRAINING}) == 1

    def _try(self, ranking: Ranking, chosen: Sequence[Share]) -> tuple[bool, bool]:
        """Estimate a combination with each schedule, then each migration threshold. Whether it is the best so far, and
        whether it fits."""
        before = self.result.best
        first: Found | None = None
        for schedule in self.schedules(ranking.structure, ranking.places, chosen):
            found = self.estimated(self.candidate(ranking, chosen, schedule), ranking.structure.note)
            if first is None or _better(found, first):
                first = found
        assert first is not None
        fits = first.estimate.problem is None
        if fits and (before is None or first.seconds < 1.5 * before.seconds):
            for migration in self.limits.migrations[1:]:
                self.estimated(replace(first.candidate, migration=migration), ranking.structure.note)
        return self.result.best is not before, fits

    def candidate(self, ranking: Ranking, chosen: Sequence[Share], schedule: Schedule) -> Candidate:
        """The structure with these shares, in the order of `places`."""
        shares: dict[Task, list[Share]] = {}
        for (task, slot), share in zip(ranking.places, chosen, strict=True):
            if task in INFERENCE and self.limits.together:
                # A scorer for each vLLM server, on one of its GPUs.
                sizes = (server.tp for server in shares["generation"] if server.pool == share.pool)
                share = replace(share, dp=slot.count // next(sizes, 1))
            shares.setdefault(task, []).append(share)
        return Candidate(
            placement=ranking.structure.placement,
            **{task: tuple(mine) for task, mine in shares.items()},  # type: ignore[arg-type]
            schedule=schedule,
            migration=self.limits.migrations[0],
            folded=self.limits.folded,
            shared_body=self.limits.shared_body,
        )

    def schedules(
        self, structure: Structure, places: Sequence[tuple[Task, Slot]], chosen: Sequence[Share]
    ) -> Sequence[Schedule]:
        """Those that the two trainings can share their GPUs by."""
        by_task = {task: share for (task, _), share in zip(places, chosen, strict=True)}
        actor, critic = by_task["actor_training"], by_task.get("critic_training")
        if critic is None or structure.apart or critic.tp != actor.tp:
            return ("Serial",)
        high, low = max(actor.pp, critic.pp), min(actor.pp, critic.pp)
        return self.limits.schedules if high > 1 and high % low == 0 else ("Serial",)

    def estimated(self, candidate: Candidate, note: str) -> Found:
        if candidate not in self._known:
            self.result.estimates += 1
            self._known[candidate] = self.costs.estimate(candidate)
        found = Found(candidate, self._known[candidate], note)
        problem = found.estimate.problem
        self._kind(Rejected(candidate.placement, note, None if problem else found.seconds, problem, candidate))
        if problem is None and (self.result.best is None or found.seconds < self.result.best.seconds):
            self.result.best = found
        return found

    def _kind(self, found: Rejected) -> None:
        """Keep the best of a kind: the fastest that fits, or else the first reason why none does."""
        key = (found.placement, found.note)
        old = self._kinds.get(key)
        if old is None or (found.seconds is not None and (old.seconds is None or found.seconds < old.seconds)):
            self._kinds[key] = found

    # ------------------------------------------------------------ the descent

    def _cuts(self, structure: Structure) -> frozenset[int]:
        """Sizes of the structure's slots."""
        return frozenset(slot.count for task in TASKS for slot in structure.slots(task))

    def _descend(self, ranking: Ranking) -> None:
        """Change one task's layout at a time, or both trainings' at once, among all that fit, while that helps."""
        wide = self.ranker.rank(ranking.structure, width=10**9)
        assert isinstance(wide, Ranking)
        improved = True
        while improved and not self._over():
            before = self.result.best
            for at in range(len(wide.layouts)):
                for option in self._within_slack(wide, at):
                    self._vary(wide, {at: option.share})
            for pair in self._pairs(wide):
                self._vary(wide, pair)
            improved = self.result.best is not before

    def _chosen(self) -> list[Share]:
        assert self.result.best is not None
        return [share for _, share in self.result.best.candidate.placed]

    def _within_slack(self, wide: Ranking, at: int) -> list[Option]:
        """Layouts of a place that alone take not much longer than the one in use."""
        used = self._chosen()[at]
        seconds = next((o.seconds for o in wide.layouts[at] if o.share == used), 0.0)
        return [o for o in wide.layouts[at] if o.seconds <= SLACK * seconds]

    def _pairs(self, wide: Ranking) -> list[dict[int, Share]]:
        """Layouts of actor and critic that can share a schedule, the fastest first."""
        places = [at for at, (task, _) in enumerate(wide.places) if task in TRAINING]
        if len(places) != 2 or wide.structure.apart:
            return []
        actor, critic = places
        both = [
            (a.seconds + b.seconds, order, {actor: a.share, critic: b.share})
            for order, (a, b) in enumerate(product(self._within_slack(wide, actor), self._within_slack(wide, critic)))
            if a.share.tp == b.share.tp and max(a.share.pp, b.share.pp) % min(a.share.pp, b.share.pp) == 0
        ]
        return [pair for _, _, pair in heapq.nsmallest(PAIRS, both, key=lambda p: p[:2])]

    def _vary(self, wide: Ranking, changes: Mapping[int, Share]) -> None:
        if not self._over():
            varied = [changes.get(at, share) for at, share in enumerate(self._chosen())]
            if self.agrees(wide, varied):
                self._try(wide, varied)


def _better(a: Found, b: Found) -> bool:
    return (a.estimate.problem is not None, a.seconds) < (b.estimate.problem is not None, b.seconds)


def _near(cuts: frozenset[int], pool: Pool, count: int) -> list[int]:
    """Sizes within NEAR nodes of those in `cuts`."""
    unit = pool.per_node
    near = {cut + step * unit for cut in cuts for step in range(-NEAR, NEAR + 1)}
    return sorted(n for n in near if 0 < n < count)


def exhaustive(inventory: Inventory, workload: Workload, limits: Limits, costs: Estimator) -> Result:
    """Every structure, every combination of layouts, every schedule and threshold: for small cases, and to test by."""
    search = Search(inventory, workload, limits, costs, Effort(estimates=10**12), lean=False)
    for structure in structures(inventory, workload, limits, every_size):
        search.result.structures += 1
        ranking = search.ranker.rank(structure, width=10**9)
        if isinstance(ranking, str):
            continue
        for chosen in filter(partial(search.agrees, ranking), combinations(ranking.layouts)):
            for schedule in search.schedules(structure, ranking.places, chosen):
                for migration in limits.migrations:
                    candidate = search.candidate(ranking, chosen, schedule)
                    search.estimated(replace(candidate, migration=migration), structure.note)
    return search.result
