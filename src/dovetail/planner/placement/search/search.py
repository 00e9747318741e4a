"""Searches for the fastest placement that fits, with bounds, a beam and then a descent.

A structure says which task gets which GPUs. Structures are ranked by the fastest layouts of their tasks, each taken
alone. In that order, the best few combinations of layouts of each structure are estimated as whole iterations. This
ends when no other structure can be faster, the effort is spent, or time is up. At last the layouts and sizes of the
best ones are varied one at a time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from dovetail.planner.candidate import Candidate, Placement, Task
from dovetail.planner.costs.gpu import Estimate, GPUCosts, Option
from dovetail.planner.inventory import Pool
from dovetail.planner.placement.search.combine import Combination, Combinations
from dovetail.planner.placement.search.limits import FINE_MIGRATIONS, MIGRATIONS, Limits
from dovetail.planner.placement.search.ranking import EVERY, Ranker, Ranking
from dovetail.planner.placement.search.structures import Sizes, Structures, joined, sizes

# The descent tries layouts that alone take up to this factor longer than the one in use.
SLACK = 1.25
# The number of combinations from which a descent starts: in all, and of one structure.
FINALISTS = 6
STARTS = 2
# The number of pairs of layouts that the descent tries for two tasks.
PAIRS = 24
# The pairs of tasks whose layouts the descent changes together.
_BESIDE: tuple[tuple[Task, Task], ...] = (
    ("actor_training", "critic_training"),
    ("generation", "actor_training"),
    ("critic", "critic_training"),
)
# The most nodes by which the sizes of the best structure are varied, if not all sizes were tried.
NEAR = 3


@dataclass(frozen=True)
class Effort:
    """The search ends after `estimates` whole iterations, or once `expired()`, asked between them, is True."""

    estimates: int = 1500
    expired: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Found:
    """A candidate with its estimate."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass(frozen=True)
class Rejected:
    """The best candidate of a kind of placement. Either it is slower than the plan (`seconds`), or it does not fit
    (`problem`). One that does not fit may have no layouts. `need`: its need as a fraction of GPU memory."""

    candidate: Candidate
    seconds: float | None = None
    problem: str | None = None
    need: float = float("inf")

    def better(self, other: Rejected) -> bool:
        """Whether this is the better of two candidates of the same kind."""
        if self.seconds is None or other.seconds is None:
            return self.seconds is not None or (other.seconds is None and self.need < other.need)
        return self.seconds < other.seconds


@dataclass
class Result:
    """The result of a search. `best`: None if nothing fits. `estimates`: the number of estimated iterations."""

    best: Found | None = None
    rejected: list[Rejected] = field(default_factory=list)
    estimates: int = 0


def alternatives(result: Result, instead: Found) -> list[Rejected]:
    """The candidates that a result rejects if `instead` is the plan. The result's own best placement comes first, and
    no placement has the kind of `instead`."""
    assert result.best is not None
    first = Rejected(result.best.candidate, result.best.seconds)
    return [r for r in (first, *result.rejected) if r.candidate.kind != instead.candidate.kind]


class Search:
    """One search. It is deterministic if `effort.expired` is deterministic."""

    combine: type[Combinations] = Combinations

    def __init__(self, limits: Limits, costs: GPUCosts, effort: Effort) -> None:
        self.limits, self.costs, self.effort = limits, costs, effort
        self.ranker = Ranker(limits, costs)
        self.result = Result()
        self._known: dict[Candidate, Estimate] = {}
        self._finalists: list[tuple[float, int, Combinations, Found]] = []
        self._kinds: dict[tuple[Placement, str], Rejected] = {}

    def run(self) -> Result:
        """The best placement of all structures."""
        best = self._round(sizes, 0.5)
        if best is not None and not self._over():
            self._round(partial(_near, {share.gpus for _, share in best.ranking.places}), 0.7, best)
        for mine, start in self._chosen():
            self._descend(mine, start)
        self._threshold()
        found = self.result.best
        chosen = None if found is None else found.candidate.kind
        others = [r for kind, r in self._kinds.items() if kind != chosen]
        self.result.rejected = sorted(others, key=lambda r: (r.seconds is None, r.seconds or 0.0, r.candidate.kind))
        return self.result

    def _round(self, grid: Sizes, until: float, best: Combinations | None = None) -> Combinations | None:
        """Estimate each structure once, and then more combinations of the best structures, until the fraction `until`
        of the effort is spent. It goes on longer only if nothing fits yet. Returns those of the best structure."""
        begun, glanced = self.result.estimates, []
        for order, ranking in enumerate(sorted(self._ranked(grid), key=lambda r: r.guess)):
            if self._over() or self._spent(begun, until / 2):
                break
            if self.result.best is None or ranking.bound < self.result.best.seconds:
                mine = self.combine(ranking, self.ranker)
                seconds, improved = self._glance(mine)
                best = mine if improved else best
                glanced.append((seconds, order, mine))
        for _, _, mine in sorted(glanced, key=lambda g: g[:2]):
            if self._over() or self._spent(0, until):
                break
            self._beam(mine)
        finalist = min(self._finalists, key=lambda f: f[:2], default=None)
        return best if finalist is None else finalist[2]

    def _spent(self, begun: int, share: float) -> bool:
        return self.result.best is not None and self.result.estimates - begun >= share * self.effort.estimates

    def _glance(self, mine: Combinations) -> tuple[float, bool]:
        """The seconds of the structure's first combination that fits, and whether it is the best so far. The seconds
        are infinite if none of a few fits. Schedule and threshold are those that are likely to be fast."""
        before = self.result.best
        for chosen in (*mine.few(), mine.least()):
            if chosen is None or self._over():
                continue
            found = self._once(mine, chosen)
            if found.estimate.fits:
                return found.seconds, self.result.best is not before
        return float("inf"), False

    def _once(self, mine: Combinations, chosen: Combination) -> Found:
        """Estimate a combination with the best candidate's threshold and the schedule that is likely to be fastest."""
        best, migrations = self.result.best, self.limits.migrations
        migration = best.candidate.migration if best else migrations[len(migrations) // 2]
        return self.estimated(replace(mine.candidate(chosen, mine.schedules(chosen)[-1]), migration=migration))

    def _over(self) -> bool:
        # Some effort is kept for `_threshold`, which comes last.
        kept = min(len(FINE_MIGRATIONS), self.effort.estimates // 10)
        return self.result.estimates >= self.effort.estimates - kept or self.effort.expired()

    # ------------------------------------------------------------ structures

    def structures(self, grid: Sizes) -> Iterator[Candidate]:
        """The structures that the search examines."""
        return Structures(self.costs.inventory, self.costs.work, self.limits, grid).every()

    def _ranked(self, grid: Sizes) -> list[Ranking]:
        found = []
        for structure in self.structures(grid):
            ranking = self.ranker.rank(structure)
            if isinstance(ranking, Ranking):
                found.append(ranking)
            else:
                self._kind(Rejected(structure, problem=ranking.problem, need=ranking.need))
            if self.effort.expired():
                break
        return found

    # ------------------------------------------------------------ combinations

    def _beam(self, mine: Combinations) -> None:
        """Estimate the structure's best combinations. The best of them become finalists."""
        best = self.result.best
        if best is not None and mine.ranking.bound >= best.seconds:
            return
        found: list[tuple[float, int, Combination]] = []
        for order, chosen in enumerate(mine.many()):
            if self._over():
                break
            once = self._once(mine, chosen)
            if once.estimate.fits:
                found.append((once.seconds, order, chosen))
        least = mine.least()
        if not found and least is not None:
            found.append((0.0, 0, least))
        for _, _, chosen in sorted(found)[:STARTS]:
            if self._over():
                break
            tried = self._try(mine, chosen)
            if tried.estimate.fits:
                self._finalists.append((tried.seconds, len(self._finalists), mine, tried))

    def _try(self, mine: Combinations, chosen: Combination) -> Found:
        """Find the best schedule for a combination, and then the best migration threshold."""
        found = min((self.estimated(mine.candidate(chosen, each)) for each in mine.schedules(chosen)), key=_order)
        if found.estimate.fits:
            candidates = (replace(found.candidate, migration=m) for m in self.limits.migrations[1:])
            found = min([found, *map(self.estimated, candidates)], key=_order)
        return found

    def estimated(self, candidate: Candidate) -> Found:
        """Estimate a candidate, unless it is known already, and keep it if it is the best so far."""
        if candidate not in self._known:
            self.result.estimates += 1
            self._known[candidate] = self.costs.estimate(candidate)
        found = Found(candidate, self._known[candidate])
        problem = found.estimate.problem
        need = max(m.device_bytes / m.capacity for m in found.estimate.memory)
        self._kind(Rejected(candidate, None if problem else found.seconds, problem, need))
        if problem is None and (self.result.best is None or found.seconds < self.result.best.seconds):
            self.result.best = found
        return found

    def _kind(self, found: Rejected) -> None:
        """Keep the best candidate of each kind of placement: the fastest that fits, or the one nearest to fitting."""
        old = self._kinds.get(found.candidate.kind)
        if old is None or found.better(old):
            self._kinds[found.candidate.kind] = found

    # ------------------------------------------------------------ the descent

    def _descend(self, start_at: Combinations, current: Found) -> None:
        """Change the layout of one task or of two tasks at a time, among all that fit, while that helps."""
        wide = self.ranker.rank(start_at.ranking.structure, EVERY)
        assert isinstance(wide, Ranking)
        mine, improved = self.combine(wide, self.ranker), True
        while improved and not self._over():
            before = current
            for at in range(len(wide.layouts)):
                for option in self._within_slack(wide, current, at):
                    current = self._vary(mine, current, {at: option})
            for one, other in _BESIDE:
                for pair in self._pairs(wide, current, one, other):
                    current = self._vary(mine, current, pair)
            improved = current is not before
            if improved and not self._over():
                current = min(current, self._try(mine, _shares(current)), key=_order)

    def _chosen(self) -> list[tuple[Combinations, Found]]:
        """The best finalists, and the best of each kind of placement."""
        ordered = [(mine, found) for _, _, mine, found in sorted(self._finalists, key=lambda f: f[:2])]
        rest = {found.candidate.placement: (mine, found) for mine, found in reversed(ordered[FINALISTS:])}
        known = {found.candidate.placement for _, found in ordered[:FINALISTS]}
        return [*ordered[:FINALISTS], *(rest[kind] for kind in Placement if kind in rest and kind not in known)]

    def _threshold(self) -> None:
        """Try migration thresholds in smaller steps for the best candidate."""
        found = self.result.best
        if found is not None and self.limits.migrations == MIGRATIONS:
            for migration in FINE_MIGRATIONS:
                if self.result.estimates < self.effort.estimates and not self.effort.expired():
                    self.estimated(replace(found.candidate, migration=migration))

    def _within_slack(self, wide: Ranking, current: Found, at: int) -> list[Option]:
        """The layouts of a place that alone take not much longer than the current one."""
        used = _shares(current)[at]
        seconds = next((o.seconds for o in wide.layouts[at] if o.share == used), 0.0)
        return [o for o in wide.layouts[at] if o.seconds <= SLACK * seconds]

    def _pairs(self, wide: Ranking, current: Found, one: Task, other: Task) -> list[dict[int, Option]]:
        """Pairs of layouts that go together, the fastest first. For actor and critic, pairs can share a schedule. For
        training and serving the same weights, the layouts are equal, because then no weights move."""
        places = [at for at, (task, _) in enumerate(wide.places) if task in (one, other)]
        trained = one == "actor_training"
        divided = trained and wide.structure.dedicated
        if len(places) != 2 or (wide.places[places[0]][1] != wide.places[places[1]][1] and not divided):
            return []
        first, second = places
        ones, others = (self._within_slack(wide, current, at) for at in places)
        both = [
            (a.seconds + b.seconds, order, {first: a, second: b})
            for order, (a, b) in enumerate(product(ones, others))
            if divided
            or (
                a.share.tp == b.share.tp
                and (max(a.share.pp, b.share.pp) % min(a.share.pp, b.share.pp) == 0)
                and (trained or a.share.pp == b.share.pp)
            )
        ]
        found = heapq.nsmallest(PAIRS, both, key=lambda p: p[:2])
        if trained and not divided:
            # The fastest pair of each equal number of stages is tried too. Single changes lead there through slow
            # unlike pipelines.
            alike: dict[tuple[int, int], tuple[float, int, dict[int, Option]]] = {}
            for each in sorted(both, key=lambda p: p[:2]):
                mine, theirs = (option.share for option in each[2].values())
                if (mine.pp, mine.micro_batch) == (theirs.pp, theirs.micro_batch):
                    alike.setdefault((mine.pp, mine.micro_batch), each)
            known = {order for _, order, _ in found}
            found += [each for each in alike.values() if each[1] not in known]
        return [pair for _, _, pair in found]

    def _vary(self, mine: Combinations, current: Found, changes: Mapping[int, Option]) -> Found:
        """The better of `current` and `current` with the changes."""
        if self._over():
            return current
        varied = tuple(changes[at].share if at in changes else share for at, share in enumerate(_shares(current)))
        return min(current, self._once(mine, varied), key=_order) if mine.fits(varied) else current


def _shares(found: Found) -> Combination:
    """The shares of a candidate, in the order of a ranking's places, as if each began at GPU 0."""
    return tuple(
        share.at(0) if share.pipelines == 1 else replace(share.at(0), pipelines=1)
        for _, share in found.candidate.placed
    )


def _order(found: Found) -> tuple[bool, float]:
    """A sorting key: the better candidate comes first."""
    return not found.estimate.fits, found.seconds


def _near(cuts: set[int], pool: Pool, count: int) -> list[int]:
    """The sizes within NEAR nodes of those in `cuts`."""
    unit = pool.per_node
    near = {cut + step * unit for cut in cuts for step in range(-NEAR, NEAR + 1)}
    return sorted(n for n in near if 0 < n < count)


def search_fewest_stages(limits: Limits, most: int, search: Callable[[Limits], Result]) -> tuple[Result, Limits]:
    """The result of `search` with the fewest pipeline stages of inference models with which anything fits, and the
    limits of that search. Powers of two up to `most` are tried. If nothing fits with any, the last result is returned.
    Its rejected candidates then include those with fewer stages of the same kind of placement, with the reasons.

    More stages would let more GPUs of a pod score at the same time. Only the cost model says so, and no measurement."""
    failed: dict[int, Result] = {}
    stages = 1
    while True:
        tried = replace(limits, inference_pp=min(stages, limits.inference_pp))
        result = search(tried)
        if result.best is not None or 2 * stages > min(most, limits.inference_pp):
            break
        failed[stages] = result
        stages *= 2
    best = result.best
    for count, other in failed.items():
        how = "inference models whole" if count == 1 else f"inference models on at most {count} GPUs"
        for r in other.rejected:
            if best is not None and r.problem is not None and r.candidate.kind == best.candidate.kind:
                candidate = replace(r.candidate, note=joined(r.candidate.note, how))
                result.rejected.append(Rejected(candidate, problem=r.problem))
    return result, tried
