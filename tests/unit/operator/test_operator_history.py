"""What stays of a job's curves: bounded, in order, with both ends, and gathered while the job runs."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kube import coordinator_http, names
from dovetail.manifest.types import Stage
from dovetail.operator.cluster.coordinator_poller import CoordinatorPoller
from dovetail.operator.reconcile.children import Children
from dovetail.operator.reconcile.history import MOST_METRICS, MOST_ROWS, JobHistory, last_row
from dovetail.protocol.process.process_names import COORDINATOR
from helpers.patience import PATIENCE

KEY = ("default", "demo")


def row(step, stage="ppo", **metrics):
    return {"stage": stage, "step": step, "time": 1.7e9 + step, "metrics": {"reward": 0.5, **metrics}}


def steps(history):
    return [(item["stage"], item["step"]) for item in json.loads(history.text() or "[]")]


@given(st.lists(st.tuples(st.sampled_from([s.value for s in Stage]), st.integers(0, 10**6)), max_size=700))
def test_rows_are_bounded_in_order_and_keep_the_ends(places):
    history = JobHistory("secret")
    for stage, step in places:
        history.take([row(step, stage)])
    last = list(dict.fromkeys(reversed(places)))[::-1]  # of a replayed step the last counts
    kept = steps(history)
    assert len(kept) <= MOST_ROWS
    assert kept == [place for place in last if place in set(kept)]
    assert kept[-1:] == places[-1:]
    if len(last) <= MOST_ROWS:
        assert kept == last


@pytest.mark.slow
def test_a_long_job_fits_and_its_whole_length_is_there():
    history = JobHistory("secret")
    for step in range(10_000):
        history.take([row(step, **{f"seconds_phase{i}": 1 / 3 for i in range(50)})])
    kept = [step for _, step in steps(history)]
    assert (kept[0], kept[-1]) == (0, 9999)
    assert MOST_ROWS // 2 <= len(kept) <= MOST_ROWS
    assert len(history.text()) < 100_000
    assert all(len(item["metrics"]) == MOST_METRICS for item in json.loads(history.text()))


@pytest.mark.parametrize(
    "item",
    [
        *(None, 3, {}, {"stage": "ppo"}, row(1, "dqn"), row(1) | {"step": "x"}, row(1) | {"time": float("nan")}),
        *(row(1) | {"metrics": None}, last_row({}, 0.0), last_row({"stage": "ppo", "iteration": None}, 0.0)),
    ],
)
def test_what_is_no_row_is_passed_over(item):
    history = JobHistory("secret")
    history.take([item, row(7, other=1.0, kl=float("inf"), loss=0.123456789)])
    (kept,) = json.loads(history.text())
    assert (kept["step"], kept["metrics"]) == (7, {"reward": 0.5, "loss": 0.123457})


def test_evaluations_keep_the_metrics_of_the_users():
    history = JobHistory("secret")
    history.take([row(5, "evaluation", exactMatch=0.75, exactMatch_ci95=0.05)])
    (kept,) = json.loads(history.text())
    assert kept["metrics"] == {"reward": 0.5, "exactMatch": 0.75, "exactMatch_ci95": 0.05}


def test_the_last_word_adds_a_step_and_replaces_none():
    history = JobHistory("secret")
    history.take([row(1, seconds_training=2.0)])
    history.take([last_row({"stage": "ppo", "iteration": 1, "metrics": {"reward": 9.0}}, 5.0)], missing=True)
    history.take([last_row({"stage": "ppo", "iteration": 2, "metrics": {"reward": 9.0}}, 5.0)], missing=True)
    first, second = json.loads(history.text())
    assert first["metrics"] == {"reward": 0.5, "seconds_training": 2.0}
    assert second == {"stage": "ppo", "step": 2, "time": 5.0, "metrics": {"reward": 9.0}}


def children(address):
    labels = {names.JOB_LABEL: "demo", names.ROLE_LABEL: COORDINATOR}
    pod = {"metadata": {"name": "c", "labels": labels}, "status": {"phase": "Running", "podIP": address}}
    return Children({("Pod", "c"): pod})


def test_steps_are_taken_as_they_come_and_outlive_the_coordinators_pod(monkeypatch):
    """Page by page, each once; a job of the same name, whose token is another, starts afresh."""
    rows, asked = [row(1), row(2), row(3)], []

    async def status(request):
        return web.json_response({"stage": "ppo", "iteration": len(rows)})

    async def history(request):
        offset = int(request.query["offset"])
        asked.append(offset)
        return web.json_response({"rows": rows[offset : offset + 2], "offset": min(offset + 2, len(rows))})

    @contextlib.asynccontextmanager
    async def follower():
        app = web.Application()
        app.router.add_get("/v1/status", status)
        app.router.add_get("/v1/history", history)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr(coordinator_http, "COORDINATOR_PORT", runner.addresses[0][1])
        async with aiohttp.ClientSession() as session:
            changed = asyncio.Queue()
            made = CoordinatorPoller(session, 0.01, changed.put)
            try:
                yield made, changed
            finally:
                await made.close()
                await runner.cleanup()

    async def check():
        async with follower() as (made, changed):
            made.report(KEY, children("127.0.0.1"), "secret")
            await asyncio.wait_for(changed.get(), PATIENCE)
            assert steps(made.history(KEY)) == [("ppo", 1), ("ppo", 2), ("ppo", 3)]
            assert asked == [0, 2, 3]
            rows.append(row(4))
            await asyncio.wait_for(changed.get(), PATIENCE)
            assert steps(made.history(KEY))[-1] == ("ppo", 4)
            assert made.report(KEY, Children({}), "secret") is None
            assert len(steps(made.history(KEY))) == 4, "the pod is gone, its steps are not"
            del rows[1:]
            made.report(KEY, children("127.0.0.1"), "another")
            await asyncio.wait_for(changed.get(), PATIENCE)
            assert steps(made.history(KEY)) == [("ppo", 1)]
            made.forget(KEY)
            assert made.history(KEY) is None

    asyncio.run(check())
