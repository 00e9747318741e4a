"""Models, and rows of figures beside the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from dovetail.gpus.inventory import Inventory
from dovetail.manifest.model_shape import ModelShape
from dovetail.planner.candidate import Candidate
from dovetail.planner.seconds import Estimate
from dovetail.planner.workload import Workload
from papers.system import System, SystemCosts

# Layers, hidden and intermediate size, heads. The 350M is PUZZLE's Table 1 (its heads are not given).
_LLAMA = {
    "350M": (16, 512, 11008, 8),
    "7B": (32, 4096, 11008, 32),
    "13B": (40, 5120, 13824, 40),
    "33B": (60, 6656, 17920, 52),
    "65B": (80, 8192, 22016, 64),
}


def llama(name: str) -> ModelShape:
    layers, hidden, intermediate, heads = _LLAMA[name]
    return ModelShape("llama", layers, hidden, intermediate, heads, heads, hidden // heads, 32000)


def tensor_parallel(*shapes: ModelShape) -> tuple[int, ...]:
    """Ranks within a node of eight that the heads of all these models divide among: up to 4 for the 33B's 52."""
    return tuple(tp for tp in (1, 2, 4, 8) if all(shape.heads % tp == 0 for shape in shapes))


@dataclass(frozen=True)
class Figure:
    """A published number beside ours; None: it does not fit in memory (OOM). `group`: figures of one setting, whose
    order is compared."""

    name: str
    group: str
    published: float | None
    ours: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        if not self.published or self.ours is None:
            return None
        return self.ours / self.published - 1


@dataclass
class Section:
    """One table or figure of a paper. `orders`: pairs (better, worse, whether ours agrees) that the text states."""

    title: str
    unit: str
    figures: list[Figure] = field(default_factory=list)
    orders: list[tuple[str, str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Ours of the planner and the best of the paper's strategies under the same model, by setting: seconds.
    planned: list[tuple[str, float, float]] = field(default_factory=list)
    higher: bool = True

    def pairs(self) -> Iterator[tuple[str, str, bool]]:
        """(better, worse, ours agrees) of every two figures of a group that were published as different."""
        groups: dict[str, list[Figure]] = {}
        for figure in self.figures:
            groups.setdefault(figure.group, []).append(figure)
        for group in groups.values():
            for a, b in combinations(group, 2):
                if a.published == b.published:
                    continue
                published, ours = _value(a.published) - _value(b.published), _value(a.ours) - _value(b.ours)
                first, second = (a, b) if (published > 0) == self.higher else (b, a)
                yield f"{first.group} {first.name}", second.name, published * ours > 0
        yield from self.orders

    def lines(self) -> Iterator[str]:
        yield f"\n{self.title} ({self.unit})"
        if self.figures:
            yield f"  {'':44}{'published':>10}{'ours':>10}{'error':>8}"
        for f in self.figures:
            error = f"{f.error:+.0%}" if f.error is not None else ("same" if f.published == f.ours else "wrong")
            name = f"{f.group} {f.name}"
            yield f"  {name:44}{_cell(f.published):>10}{_cell(f.ours):>10}{error:>8}  {f.note}".rstrip()
        for note in self.notes:
            yield f"  {note}"
        wrong = [f"{better} over {worse}" for better, worse, agrees in self.pairs() if not agrees]
        if wrong:
            yield f"  order missed: {'; '.join(wrong)}"


def _value(number: float | None) -> float:
    return 0.0 if number is None else number


def _cell(number: float | None) -> str:
    return "OOM" if number is None else f"{number:.2f}"


@dataclass(frozen=True)
class Measured:
    """The best candidate of a strategy; None fits nowhere."""

    seconds: float
    work: Workload
    candidate: Candidate
    estimate: Estimate

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.work.batch / self.seconds


def best(candidates: Iterable[Candidate], work: Workload, inventory: Inventory, system: System) -> Measured | None:
    """The fastest that fits."""
    costs = SystemCosts(work, inventory, system)
    found: Measured | None = None
    for candidate in candidates:
        each = costs.estimate(candidate)
        if each.fits and (found is None or each.seconds < found.seconds):
            found = Measured(each.seconds, work, candidate, each)
    return found


def with_batch(work: Workload, batch: int) -> Workload:
    """One mini-batch of all samples, as APP and PUZZLE train."""
    return replace(work, batch=batch, mini_batch=batch)
