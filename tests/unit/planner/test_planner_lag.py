"""What a plan says of iterations with a lag, and the lag that it would take."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group

from dovetail.cli.common.plan_tables import plan_tables, prediction_tables
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve, with_lag
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.lags import PLAYED, DrawnIterations, Parts, Steady, choose
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.plan import Plan
from dovetail.protocol.prediction import PredictedLag, Prediction
from helpers.example_jobs import EXAMPLES, hub_configs

SECONDS = st.floats(0.1, 3.0)


def steady(iterations: Sequence[Parts], lag: int, cores: int | None = None) -> Steady:
    return DrawnIterations(iterations, iterations, cores).steady(lag)


def sums(iterations: Sequence[Parts]) -> tuple[float, float]:
    """Mean seconds in which rollouts can do nothing else, and of what trainers do."""
    made = fmean(i.samples["generation"] - i.tail + i.samples["inference"] for i in iterations)
    return made, fmean(sum(i.training.values()) for i in iterations)


@st.composite
def drawn(draw: Any, shared: bool = False) -> list[Parts]:
    cores = (draw(st.floats(0.1, 2.0)), draw(st.floats(0.1, 2.0))) if shared else (0.0, 0.0)
    return [
        Parts(
            {"transfer": draw(st.floats(0.0, 0.5)), "generation": draw(SECONDS), "inference": draw(st.floats(0, 1))},
            {"training": draw(SECONDS), "other": draw(st.floats(0.0, 0.2))},
            idle=0.05,
            cores=cores,
            tail=draw(st.sampled_from([0.0, 0.1])),
            kept=draw(st.floats(0.0, 1.0)),
        )
        for _ in range(draw(st.sampled_from([1, 2, 4])))
    ]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(drawn())
def test_a_larger_lag_never_takes_longer_and_no_lag_is_faster_than_either_half(iterations: list[Parts]) -> None:
    made, learnt = sums(iterations)
    found = [steady(iterations, lag) for lag in range(4)]
    assert found[0].seconds == pytest.approx(
        fmean(sum((*i.samples.values(), *i.training.values())) for i in iterations)
    )
    for smaller, larger in pairwise(found):
        assert larger.seconds <= smaller.seconds * (1 + 1e-9)
    for each in found:
        assert each.seconds >= max(made, learnt) * (1 - 1e-9)
        assert 0 <= each.trainer_idle <= 1
        assert 0 <= each.rollout_idle <= 1
        # The trainers always do something.
        mine = (each.phases.get(name, 0.0) for name in ("training", "other", "waiting"))
        assert sum(mine) == pytest.approx(each.seconds)


@settings(deadline=None, max_examples=20)
@given(drawn(shared=True), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_processes_that_share_cores_gain_no_more_than_is_free(iterations: list[Parts], cores: int, lag: int) -> None:
    iterations = [
        Parts(i.samples, i.training, i.idle, (min(i.cores[0], cores), min(i.cores[1], cores))) for i in iterations
    ]
    found = steady(iterations, lag, cores)
    work = fmean(i.cores[0] * sum(i.samples.values()) + i.cores[1] * sum(i.training.values()) for i in iterations)
    # The mean is of half of the iterations. More or fewer samples may be drawn ahead at its end than at its beginning.
    ahead = (lag + 1) * max(sum(i.samples.values()) for i in iterations) / (PLAYED // 2)
    assert found.seconds >= work / cores * (1 - 1e-9) - ahead
    one_after_the_other = fmean(sum((*i.samples.values(), *i.training.values())) for i in iterations)
    assert found.seconds <= one_after_the_other * (1 + 1e-9) + ahead


def test_equal_halves_overlap_wholly() -> None:
    one = Parts({"generation": 2.0}, {"training": 2.0}, idle=0.5)
    assert steady([one], 0).seconds == pytest.approx(4.0)
    found = steady([one], 1)
    assert (found.seconds, found.trainer_idle) == (pytest.approx(2.0), pytest.approx(0.0))
    assert found.rollout_idle == pytest.approx(0.25), "the half second of each stage in which a rollout has no sample"
    # On one core there is nothing to win.
    assert steady([Parts({"generation": 2.0}, {"training": 2.0}, cores=(1.0, 1.0))], 1, 1).seconds == pytest.approx(4)


def test_servers_that_the_tail_does_not_need_begin_the_next_iteration() -> None:
    """Half a second of head, and a tail that keeps a quarter of the servers."""
    one = Parts({"generation": 2.5, "inference": 0.5}, {"training": 0.1}, tail=2.0, kept=0.25)
    barrier = Parts({"generation": 2.5, "inference": 0.5}, {"training": 0.1})
    assert steady([barrier], 2).seconds == pytest.approx(3.0)
    # Of the servers' time an iteration takes half a second of all, a quarter of two seconds, and the scoring.
    assert 1.5 <= steady([one], 2).seconds < 2.5
    # Where no iteration is open beside it, the tail is waited for.
    assert steady([one], 0).seconds == pytest.approx(3.1)


def test_times_that_change_need_a_larger_lag() -> None:
    """Long samples come with short training and the other way round: one iteration ahead does not even that out."""
    uneven = [Parts({"generation": s}, {"training": t}) for s, t in [(3.0, 1.0), (1.0, 1.0), (1.0, 3.0), (1.0, 1.0)]]
    seconds = [steady(uneven, lag).seconds for lag in range(3)]
    assert seconds[0] > seconds[1] > seconds[2] == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("seconds", "lag", "words"),
    [
        ([10.0, 6.0, 5.9], 1, "40% less time than without a lag; a larger lag saves at most 3% more"),
        ([10.0, 6.0, 5.0], 2, "50% less time than without a lag"),
        ([10.0, 9.9, 9.8], 0, "no lag makes an iteration more than 3% shorter"),
    ],
)
def test_the_smallest_lag_that_is_about_the_best_is_taken(seconds: list[float], lag: int, words: str) -> None:
    chosen, why = choose([PredictedLag(lag=i, iteration_seconds=s) for i, s in enumerate(seconds)])
    assert chosen == lag
    assert words in why


def shown(tables: Group) -> str:
    text = io.StringIO()
    Console(width=250, file=text).print(tables)
    return text.getvalue()


def predicted(lag: int) -> Prediction:
    """Of a job on GPUs."""
    document = yaml.safe_load((EXAMPLES / "hh-rlhf.yaml").read_text())
    document["spec"]["ppo"]["lag"] = lag
    found = make_plan(resolve(parse(document).spec), None, hub_configs("hh-rlhf")).prediction
    assert found is not None
    return found


@pytest.mark.slow
def test_a_plan_predicts_the_jobs_lag_beside_others() -> None:
    without, one = predicted(0), predicted(1)
    assert without.iteration_seconds == sum(without.phases.values()) == without.synchronous_seconds
    assert [row.lag for row in without.lags] == [0, 1, 2]
    assert without.lags[0].iteration_seconds == without.iteration_seconds
    assert one.lag == 1
    assert one.iteration_seconds == one.lags[1].iteration_seconds < one.synchronous_seconds
    assert "waiting" in one.phases
    assert one.samples_per_second > without.samples_per_second
    assert [row.lag for row in predicted(4).lags] == [0, 1, 2, 4]
    assert "trainers idle" in shown(prediction_tables(one))
    assert f"The planner would take lag {one.best_lag}: " in shown(prediction_tables(one))


def auto(name: str = "hh-rlhf", lag: int | None = None, **ppo: Any) -> tuple[RLHFJobSpec, Plan]:
    """An example whose manifest says `lag: Auto`, and its plan."""
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    document["spec"]["ppo"] |= {"lag": "Auto", **ppo}
    spec = resolve(parse(document).spec)
    return spec, make_plan(spec, None, hub_configs(name), lag=lag)


@pytest.mark.slow
def test_auto_takes_the_lag_that_the_plan_recommends_and_a_run_keeps_it() -> None:
    spec, plan = auto()
    assert plan.prediction is not None
    assert plan.lag == plan.prediction.lag == plan.prediction.best_lag == 2
    assert "less time than without a lag" in plan.lag_reason
    explicit = predicted(2)
    assert plan.prediction.iteration_seconds == explicit.iteration_seconds
    decided = with_lag(spec, plan.lag)
    assert (decided.ppo.lag, decided.ppo.kept_versions, decided.ppo.old_log_probs) == (2, 3, "Recompute")
    _, kept = auto(lag=1)
    assert (kept.lag, kept.lag_reason) == (1, "the run began with it")
    assert "Lag (spec.ppo.lag is Auto): 2, because an iteration" in shown(plan_tables(plan))


def test_auto_is_no_lag_where_none_is_possible_or_predicted() -> None:
    _, plan = auto("quickstart")
    assert plan.lag == 0
    assert "nothing is predicted" in plan.lag_reason
    document = yaml.safe_load((EXAMPLES / "hh-rlhf.yaml").read_text())
    trainers, *_ = document["spec"]["groups"]
    document["spec"]["groups"] = [{**trainers, "roles": ["trainer", "rollout"]}]
    document["spec"]["ppo"]["lag"] = "Auto"
    plan = make_plan(resolve(parse(document).spec), None, hub_configs("hh-rlhf"))
    assert plan.lag == 0
    assert "a group has both roles" in plan.lag_reason
    exact, plan = auto("quickstart", oldLogProbs="Rollout")
    assert plan.lag == 0
    assert "spec.ppo.oldLogProbs is Rollout" in plan.lag_reason
    assert with_lag(exact, plan.lag).ppo.old_log_probs == "Rollout"


@pytest.mark.slow
def test_auto_is_written_as_such_until_it_is_decided() -> None:
    spec, plan = auto()
    assert spec.model_dump(mode="json", by_alias=True)["ppo"]["lag"] == "Auto"
    assert RLHFJobSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
    decided = with_lag(spec, plan.lag)
    assert decided.model_dump(mode="json", by_alias=True)["ppo"]["lag"] == 2
    assert with_lag(decided, 1) == decided, "the manifest's own number stays"


@pytest.mark.parametrize(("price", "half"), [(None, None), (10.0, 20.0)])
def test_samples_are_as_much_faster_as_iterations_are_shorter(price: float | None, half: float | None) -> None:
    known = {"placement": "Separation", "schedule": "Serial", "migration": None, "hardware": "measured"}
    figures = {"iteration_seconds": 8.0, "samples_per_second": 2.0, "samples_per_dollar": price, "phases": {}}
    found = Prediction(**known, **figures, tasks=[], memory=[], note="as it was").lasting(4.0, lag=2)
    assert (found.iteration_seconds, found.samples_per_second, found.samples_per_dollar) == (4.0, 4.0, half)
    assert (found.lag, found.note) == (2, "as it was")
