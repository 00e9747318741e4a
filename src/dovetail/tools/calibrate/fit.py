"""Fits a machine's costs to whole iterations that were measured. The method is least squares with coefficients of at
least 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.planner.cpus import IterationWork, exposed_messages, stage_times, training_seconds
from dovetail.protocol.files.machine_profile import Cost, GenerationCosts, Machine, ScoringCosts, TrainingCosts

# The numbers of busy cores that are tried. A process that has a core of its own and never waits keeps 1 busy.
_CORES = np.linspace(0.3, 3.0, 109)


class FitError(ValueError):
    """The measurements do not determine some cost. The message is one sentence."""


@dataclass(frozen=True)
class MeasuredIteration:
    """An iteration that was measured without fusion. `phases`: the seconds of each phase. `finished`: a row for each
    time when responses ended, with the seconds since generation began and the number of responses left. `batches`: the
    models, tokens and seconds of each batch that was scored at once. `passes`: the seconds of a rank's forward and
    backward passes by model, as the mean over ranks. `waited`: how many seconds longer the slowest rank's passes took
    than the mean, summed over the optimizer steps. The ranks wait for each other after each step."""

    work: IterationWork
    phases: Mapping[str, float]
    finished: Sequence[tuple[float, int]]
    batches: Sequence[tuple[tuple[str, ...], int, float]]
    passes: Mapping[str, float]
    waited: float = 0.0


def fit(seen: Sequence[MeasuredIteration], cores: int, end_rate: float | None = None) -> Machine:
    """The costs of a machine. `seen`: iterations of three kinds. Those with one rollout and one rank, in at least two
    sizes, show what a process takes alone. Those with several rollouts and ranks show what sharing the machine costs.
    Others have pipeline stages, and scorers with different models. `end_rate`: see `end_rate` in measure.py. Raises
    FitError."""
    alone = [o for o in seen if o.work.rollouts == 1 and o.work.ranks == 1]
    shared = [o for o in seen if o.work.rollouts > 1 and o.work.dp > 1]
    if not alone or not shared:
        raise FitError("there are no measured iterations of one rollout and rank, or none of several")
    scoring = _scoring(seen, cores)
    training = TrainingCosts(
        begin=0.0,
        step=0.0,
        exchange=0.0,
        message=0.0,
        models=_passes(alone),
        cores=_busy(shared, alone, cores),
        straggling=sum(o.waited for o in shared) / sum(sum(o.passes.values()) for o in shared),
    )
    weights = nonnegative([[1.0, o.work.rollouts] for o in seen], [o.phases["weights"] for o in seen])
    other = nonnegative([[1.0, len(o.work.responses)] for o in seen], [o.phases["other"] for o in seen])
    machine = Machine(
        cores=cores,
        generation=_generation(alone),
        scoring=scoring,
        training=training,
        weights=Cost(fixed=weights[0], each=weights[1]),
        other=Cost(fixed=other[0], each=other[1]),
        prompt_tokens=float(np.mean([n for o in seen for n in o.work.prompts])),
        end_rate=end_rate,
    )
    machine = _trained(seen, machine)
    # Last, the cores that several servers use, and the rest of the scoring time.
    several = [o for o in seen if o.work.rollouts > 1]
    machine = _search(machine, several, "generation", lambda o, m: stage_times(o.work, m, None).generated)
    return _scored(machine, seen)


def nonnegative(
    features: Sequence[Sequence[float]], target: Sequence[float], scale: Sequence[float] | None = None
) -> list[float]:
    """The coefficients of at least 0 with the least squares of errors relative to `scale` (default: the target itself).
    Coefficients that would be below 0 are left out one after the other."""
    weight = 1.0 / np.maximum(np.asarray(target if scale is None else scale, float), 1e-4)
    x, y = np.asarray(features, float) * weight[:, None], np.asarray(target, float) * weight
    kept, found = list(range(x.shape[1])), np.zeros(x.shape[1])
    while kept:
        size = np.maximum(np.linalg.norm(x[:, kept], axis=0), 1e-30)
        solution = np.linalg.lstsq(x[:, kept] / size, y, rcond=1e-6)[0]
        if (solution >= 0).all():
            found[kept] = solution / size
            break
        kept.pop(int(np.argmin(solution)))
    return [float(v) for v in found]


def _generation(alone: Sequence[MeasuredIteration]) -> GenerationCosts:
    """Fit the end of a response of length l to begin + samples x sample + l x step + (tokens made until then) x
    token."""
    features, target = [], []
    for each in alone:
        lengths = np.sort(np.asarray(each.work.responses))
        count = len(lengths)
        for at, left in each.finished:
            ended = count - left
            if not ended:
                continue
            longest = float(lengths[ended - 1])
            tokens = float(np.minimum(lengths, longest).sum())
            features.append([1.0, float(count), longest, tokens])
            target.append(at)
    begin, sample, step, token = nonnegative(features, target)
    return GenerationCosts(begin=begin, sample=sample, step=step, token=token, cores=1.0)


def _scoring(seen: Sequence[MeasuredIteration], cores: int) -> ScoringCosts:
    """Fit the batches of scorers that run alone and have all models. The seconds of a token are divided among the
    models as in the batches of scorers with some of the models."""
    everything = max((c[0] for o in seen for c in o.batches), key=len)
    alone = [c for o in seen if o.work.rollouts == 1 for c in o.batches]
    several = [c for o in seen if o.work.rollouts > 1 for c in o.batches]
    batch, token = nonnegative([[1.0, tokens] for _, tokens, _ in alone], [s for *_, s in alone])
    whole = [c for c in several if c[0] == everything]
    slower = sum(s for *_, s in whole) / sum(batch + t * token for _, t, _ in whole) if whole else 1.0
    each = {}
    for part in {c[0] for c in several} - {everything}:
        mine = [c for c in several if c[0] == part]
        each[part] = max(1e-9, sum(s - slower * batch for *_, s in mine) / sum(t for _, t, _ in mine))
    share = dict.fromkeys(everything, 1.0 / len(everything))
    if each and set().union(*each) == set(everything):
        share = {m: taken / sum(each.values()) / len(part) for part, taken in each.items() for m in part}
    scorers = max(o.work.rollouts for o in seen)
    return ScoringCosts(
        begin=0.0,
        batch=batch,
        token={m: token * share[m] for m in everything},
        cores=max(0.3, slower * cores / min(scorers, cores)),
    )


def _passes(alone: Sequence[MeasuredIteration]) -> dict[str, Cost]:
    found = {}
    for model in alone[0].passes:
        features = [[o.work.executed, o.work.tokens] for o in alone]
        fixed, each = nonnegative(features, [o.passes[model] for o in alone])
        found[model] = Cost(fixed=fixed, each=each)
    return found


def _busy(shared: Sequence[MeasuredIteration], alone: Sequence[MeasuredIteration], cores: int) -> float:
    """The number of cores that a trainer rank uses. It follows from the time of passes on all ranks at once, divided by
    the time of passes alone."""
    costs = _passes(alone)
    ratios = []
    for o in shared:
        count, tokens = o.work.steps * o.work.micro_batches, o.work.tokens
        expected = sum(costs[m].fixed * count + costs[m].each * tokens for m in o.passes)
        ratios.append(sum(o.passes.values()) / expected / min(1.0, o.work.ranks / cores))
    return max(0.3, float(np.median(ratios)))


def _trained(seen: Sequence[MeasuredIteration], machine: Machine) -> Machine:
    """Fit the time of a training phase besides its passes."""
    features, target = [], []
    for o in seen:
        work = o.work
        features.append([1.0, work.steps, work.steps * (work.dp > 1), exposed_messages(work)])
        target.append(o.phases["training"] - training_seconds(work, machine))
    found = nonnegative(features, target, [o.phases["training"] for o in seen])
    costs = machine.training.model_copy(update=dict(zip(("begin", "step", "exchange", "message"), found, strict=True)))
    return machine.model_copy(update={"training": costs})


def _search(
    machine: Machine,
    seen: Sequence[MeasuredIteration],
    phase: str,
    predict: Callable[[MeasuredIteration, Machine], float],
) -> Machine:
    """Find the `cores` of the phase for which the sum of squared relative errors is smallest."""

    def with_cores(cores: float) -> Machine:
        costs = getattr(machine, phase).model_copy(update={"cores": float(cores)})
        return machine.model_copy(update={phase: costs})

    def error(cores: float) -> float:
        tried = with_cores(cores)
        return sum((predict(o, tried) / o.phases[phase] - 1) ** 2 for o in seen)

    return with_cores(min(_CORES, key=error))


def _scored(machine: Machine, seen: Sequence[MeasuredIteration]) -> Machine:
    """Fit the time of an inference phase besides its batches."""
    rest = []
    for o in seen:
        stage = stage_times(o.work, machine, None)
        rest.append(o.phases["inference"] - (stage.end - stage.generated))
    costs = machine.scoring.model_copy(update={"begin": max(0.0, float(np.median(rest)))})
    return machine.model_copy(update={"scoring": costs})
