"""What the run page shows of a run's folder, over HTTP and as documents."""

import asyncio
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from dovetail.cli.main import cli
from dovetail.coordinator.reporting.page.page_documents import NotKept, PageDocuments, batch_row
from dovetail.coordinator.reporting.page.page_health import PHASE_STALLED, advice, silent, stalled_phases
from dovetail.coordinator.reporting.page.rollout_table import life, table, turns
from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.serving.coordinator_routes import make_app
from dovetail.coordinator.store.database import Database
from dovetail.tools.run_page.demo_run import play, unpack
from dovetail.tools.run_page.page_server import RunList, at_work, coordinator_port
from helpers.demo_runs import TOKEN, append, demo_runs, serve_page
from helpers.fake_jobs_api import Run
from helpers.fake_kube import ServerThread
from helpers.finished_runs import history_of
from helpers.patience import PATIENCE

SIGNED_IN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def documents(run):
    return PageDocuments(RunFolder(run))


def ask(documents, question, alive=False):
    return json.loads(documents.answer(question, now=2e9, alive=alive))


# ---------------------------------------------------------------- documents


def test_the_overview_of_a_finished_run(documents):
    found = ask(documents, "overview")
    assert (found["state"], found["stage"], found["done"], found["total"]) == ("succeeded", "ppo", 12, 12)
    assert found["health"]["verdicts"] == []
    assert found["health"]["iteration"] == 12
    assert found["reward"] > 1
    assert found["outcome"].startswith("PPO raised held-out quality from 0.67 to 0.93 and raised held-out reward from ")
    assert found["seconds_left"] is None
    assert "Reward per sample" in [row[0] for row in found["results"]]
    assert "Learning rates" in [row[0] for row in found["facts"]]
    assert {"generation", "training", "iteration"} <= {row["phase"] for row in found["plan"]}
    assert found["sample_iterations"] == found["trace_iterations"] == list(range(1, 13))


def test_history_comes_in_parts_and_goes_on(tmp_path):
    documents = PageDocuments(RunFolder(tmp_path))
    assert ask(documents, "history/0") == {"rows": [], "next": 0, "more": False}
    append(tmp_path / "history.jsonl", {"stage": "ppo", "step": 1, "time": 1.0, "metrics": {"reward": math.nan}})
    found = ask(documents, "history/0")
    assert (found["rows"][0]["metrics"], found["next"]) == ({"reward": None}, 1)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 2, "metrics": {}}\n{"stage": "p')  # the second is still being written
    assert [row["step"] for row in ask(documents, "history/1")["rows"]] == [2]


def test_history_that_begins_anew_is_read_anew(tmp_path):
    folder, file = RunFolder(tmp_path), tmp_path / "history.jsonl"
    rows = [{"stage": "sft", "step": step, "metrics": {}} for step in range(1, 6)]
    append(file, *rows)
    assert folder.rows() == rows
    file.write_text("")
    assert folder.rows() == []
    append(file, *rows, *rows)
    assert folder.rows() == [*rows, *rows]


def test_a_sample_has_its_tokens_and_its_life(documents):
    iteration = ask(documents, "overview")["token_iterations"][-1]
    row = ask(documents, f"samples/{iteration}")["rows"][3]
    found = ask(documents, f"sample/{iteration}/{row['prompt']}/{row['sample']}")
    tokens = found["tokens_of"]
    assert len(tokens["response"]) == len(tokens["logprob"]) == len(tokens["reference"]) == found["tokens"]
    assert found["response"].strip() in "".join(tokens["response"])
    assert found["prompt"].strip() in "".join(tokens["prompt"])
    assert all(value <= 0.01 for value in tokens["logprob"])
    assert [turn["role"] for turn in found["turns"]] == ["user", "assistant"]
    assert [turn["learnt"] for turn in found["turns"]] == [False, True]
    assert found["life"]["parts"][-1]["to"] == found["tokens"]


def test_moves_are_remembered_as_long_as_their_samples_are_kept(tmp_path):
    moves = [{"event": "sample.moved", "sample": [iteration, 0, 0]} for iteration in range(1, 41)]
    append(tmp_path / "events.jsonl", *moves)
    (tmp_path / "samples").mkdir()
    append(tmp_path / "samples" / "iteration-000039.jsonl", {"prompt_index": 0, "sample_index": 0})
    folder = RunFolder(tmp_path)
    assert [folder.moves(iteration) for iteration in (38, 39, 40)] == [[], [moves[38]], [moves[39]]]


def test_a_schedule_that_comes_later_is_seen(tmp_path):
    folder = RunFolder(tmp_path)
    assert not folder.has_schedule()
    append(tmp_path / "schedule.json", {"problem": "too few ranks"})
    assert not folder.has_schedule()
    (tmp_path / "schedule.json").write_text(json.dumps({"before": {}, "after": {}, "chosen": "fused"}))
    assert folder.has_schedule()


def test_a_sample_is_found_in_a_batch_of_another_order():
    batch = {"groups": np.array([2, 2, 0, 0, 1, 1], np.int32)}
    assert [batch_row(batch, prompt, number) for prompt in range(3) for number in range(2)] == [2, 3, 4, 5, 0, 1]
    assert batch_row(batch, 3, 0) == batch_row({}, 0, 0) == -1


def test_a_samples_way_over_servers_and_weights():
    row = {"iteration": 4, "rollout": "c", "tokens": 50, "first_version": 2, "weight_version": 3, "reward": 1.5}
    moves = [
        {"event": "sample.moved", "time": 2.0, "source": "b", "instance": "c", "tokens": 40, "mechanism": "kv"},
        {"event": "sample.moved", "time": 1.0, "source": "a", "instance": "b", "tokens": 10, "mechanism": "tokens"},
    ]
    found = life(row, moves)
    assert [(p["server"], p["from"], p["to"], p["version"]) for p in found["parts"]] == [
        ("a", 0, 10, 2),
        ("b", 10, 40, 2),
        ("c", 40, 50, 3),
    ]
    told = [step["text"] for step in found["steps"]]
    assert told[0] == "begun on a with weights 2"
    assert "moved from b to c at token 40, with its keys and values" in told[2]
    assert told[-2:] == ["scored 1.5", "learnt in iteration 4"]


def test_the_table_counts_groups_whose_rewards_are_equal():
    rows = [{"prompt_index": p, "sample_index": s, "reward": float(p * s)} for p in range(3) for s in range(2)]
    found = table(rows, [{"event": "sample.moved", "sample": [1, 2, 1]}])
    assert (found["groups"], found["equal_groups"]) == (3, 1)
    assert [row["migrations"] for row in found["rows"]] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "roles"),
    [
        (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "system user",
        ),
        ("\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:", "user assistant user"),
        ("2 + 2 = ", "prompt"),
    ],
)
def test_turns_of_a_prompt(prompt, roles):
    found = turns(prompt, "4")
    assert [turn["role"] for turn in found] == [*roles.split(), "assistant"]
    assert "<|im" not in "".join(turn["text"] for turn in found)


def test_the_schedule_as_drawn_and_as_run(documents):
    found = ask(documents, "schedule/11")
    ranks = len(found["drawn"]["ranks"])
    assert ranks == len(found["serial"]["ranks"]) == len(found["run"]["ranks"]) == 2
    for drawn, run in zip(found["drawn"]["ranks"], found["run"]["ranks"], strict=True):
        order = [(action["model"], action["kind"], action["micro_batch"]) for action in drawn]
        assert [(action["model"], action["kind"], action["micro_batch"]) for action in run] == order


def test_what_is_not_kept_is_said_in_a_sentence(documents):
    with pytest.raises(NotKept, match="the samples of iteration 99 are not kept"):
        documents.answer("samples/99", 0.0, None)
    with pytest.raises(NotKept, match="no such page"):
        documents.answer("samples/../../job.json", 0.0, None)


def test_a_run_whose_processes_are_gone_is_told_from_one_that_goes_on(tmp_path):
    append(tmp_path / "history.jsonl", {"stage": "sft", "step": 1, "time": 1.0, "metrics": {"loss": 2.0}})
    database = Database(tmp_path / "store.sqlite")
    documents = PageDocuments(RunFolder(tmp_path))
    # The lock is the coordinator's, of another process than the page's: a process is not in its own way.
    assert ask(documents, "overview", alive=True)["state"] == "running"
    database.close()
    assert at_work(tmp_path) is False
    stopped = ask(documents, "overview", alive=at_work(tmp_path))
    assert stopped["state"] == "stopped"
    assert "dovetail run --resume" in stopped["reason"]


def test_a_folder_that_may_not_be_read_hides_no_run(tmp_path, monkeypatch):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        append(tmp_path / name / "history.jsonl", {"stage": "sft", "step": 1, "metrics": {}})
    stat = os.stat

    def refused(path, **options):
        """As the system answers everybody but root."""
        if "theirs" in str(path) and not str(path).endswith("theirs"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert list(RunList(tmp_path).runs()) == ["mine"]


def nested(depth):
    return "[" * depth + "]" * depth


# What a run's folder may hold by accident or malice, by the name of a file.
FOREIGN = {
    "deep": {"job.json": nested(200_000), "summary.json": nested(200_000), "history.jsonl": nested(200_000) + "\n"},
    "deep-spec": {"job.json": '{"spec": {"seed": 1, "data": ' + nested(900) + "}}"},
    "odd": {"job.json": '{"metadata": [], "spec": 3}', "history.jsonl": '{"stage": ["x"], "step": 1, "metrics": {}}\n'},
    "words": {"history.jsonl": '{"stage": "ppo", "step": 1, "time": "noon", "metrics": {"reward": "high"}}\n'},
    "list": {"job.json": "[]", "summary.json": "7", "plan.json": "null", "events.jsonl": nested(200_000) + "\n"},
}


@pytest.mark.slow
def test_no_folder_hides_the_other_runs(tmp_path):
    for name, files in FOREIGN.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    names = ("job.json", "plan.json", "summary.json", "events.jsonl", "token", "store.lock", "schedule.json")
    for name in (
        *names,
        "samples/iteration-000001.jsonl",
        "traces/iteration-0001.json",
        "experience/000001.safetensors",
    ):
        path = tmp_path / f"fifo-{name.split('/')[0]}" / name
        path.parent.mkdir(parents=True)
        os.mkfifo(path)
        append(path.parents[name.count("/")] / "history.jsonl", {"stage": "ppo", "step": 1, "time": 1.0, "metrics": {}})
    (tmp_path / "mine").mkdir()
    append(tmp_path / "mine" / "history.jsonl", {"stage": "ppo", "step": 7, "time": 1.0, "metrics": {"reward": 0.5}})
    server = serve_page(tmp_path)
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=SIGNED_IN) as client:
        found = {run["id"]: run for run in client.get("/api/v1/runs").json()["runs"]}
        assert found["mine"]["done"] == 7
        for name in found:
            for question in (
                "overview",
                "events",
                "history/0",
                "samples/1",
                "sample/1/0/0",
                "timeline/1",
                "schedule/1",
            ):
                reply = client.get(f"/api/v1/runs/{name}/{question}")
                assert reply.status_code == 200 or "detail" in reply.json(), (name, question, reply.text)
            client.get(f"/api/v1/runs/{name}/live")
        with client.stream("GET", "/api/v1/changes") as reply:
            told = next(json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        assert told.keys() == found.keys()
    server.close()
    assert [found[name]["reward"] for name in ("mine", "words")] == [0.5, None]


# ---------------------------------------------------------------- health


def test_a_phase_of_six_times_its_median_is_a_verdict():
    rows = [{"seconds_generation": 2.0, "seconds_training": 1.0}] * 5
    assert stalled_phases(rows) == []
    (found,) = stalled_phases([*rows, {"seconds_generation": 12.1, "seconds_training": 1.0}])
    assert found.reason == PHASE_STALLED
    assert "generation stalled: it took 12.1 s, 6.05 times its median of 2 s" in found.message
    assert stalled_phases([{"seconds_weights": 0.01}] * 5 + [{"seconds_weights": 0.2}]) == [], "too short to matter"


def test_silence_is_a_verdict():
    times = [float(10 * step) for step in range(6)]
    assert silent(times, now=100.0) is None
    found = silent(times, now=200.0)
    assert found is not None
    assert "no step has ended for 150 s, 15 times the median of 10 s" in found.message


def test_advice_names_times_that_a_run_writes(tmp_path):
    recorded = unpack(tmp_path)
    recorded.write("history.jsonl")
    row = {**history_of(recorded.folder)["ppo"][1]}
    assert advice([row] * 5) == []
    row["seconds_weights"] = row["iteration_seconds"] / 2
    assert "Sending weights takes 50% of an iteration" in " ".join(advice([row] * 5))


def test_advice_is_for_healthy_runs_only(tmp_path):
    slow = {"seconds_generation": 8.0, "iteration_seconds": 10.0, "finished_fraction": 1.0, "samples": 4.0}
    assert any("Generation takes 80%" in sentence for sentence in advice([slow] * 5))
    assert not any("Generation takes" in sentence for sentence in advice([slow] * 5, lag=1))
    rows = [{"stage": "ppo", "step": i, "time": float(i), "metrics": slow} for i in range(1, 6)]
    append(tmp_path / "history.jsonl", *rows)
    documents = PageDocuments(RunFolder(tmp_path))
    assert "Generation takes 80%" in " ".join(ask(documents, "overview")["health"]["advice"])
    equal = slow | {"reward_min": 1.0, "reward_max": 1.0}
    append(tmp_path / "history.jsonl", {"stage": "ppo", "step": 6, "time": 6.0, "metrics": equal})
    found = ask(documents, "overview")["health"]
    assert ([verdict["reason"] for verdict in found["verdicts"]], found["advice"]) == (["RewardsEqual"], [])
    assert found["unhealthy"] == [6]


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def client(run):
    server = serve_page(run.parent)
    with httpx.Client(base_url=server.url, headers=SIGNED_IN) as found:
        yield found
    server.close()


@pytest.mark.slow
def test_the_list_hears_of_ended_steps_alone(tmp_path):
    """Of hundreds of runs nobody looks through the folders of samples and traces twice a second."""
    run = tmp_path / "run"
    run.mkdir()
    append(run / "history.jsonl", {"stage": "sft", "step": 1, "metrics": {}})
    append(run / "events.jsonl", {"event": "sample.moved"})
    server = serve_page(tmp_path)
    with (
        httpx.Client(base_url=server.url, headers=SIGNED_IN, timeout=PATIENCE) as client,
        client.stream("GET", "/api/v1/changes") as reply,
    ):
        told = (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: "))
        first = next(told)
        append(run / "events.jsonl", {"event": "sample.moved"})
        append(run / "history.jsonl", {"stage": "sft", "step": 2, "metrics": {}})
        second = next(told)
    server.close()
    assert sorted(first["run"]) == ["alive", "history.jsonl", "summary.json"]
    assert second["run"]["history.jsonl"] > first["run"]["history.jsonl"]


def test_runs_of_one_manifest_are_a_group(client):
    runs = client.get("/api/v1/runs").json()["runs"]
    assert len(runs) >= 2
    assert len({run["group"] for run in runs}) < len(runs), "seeds of one manifest"
    assert len({run["seed"] for run in runs}) == len(runs)


def test_a_run_has_one_duration(client, run):
    """In the list of runs and on the run's own page, over all its resumes."""
    (listed,) = (line for line in client.get("/api/v1/runs").json()["runs"] if line["id"] == run.name)
    overview = client.get(f"/api/v1/runs/{run.name}/overview").json()
    assert listed["seconds"] == overview["seconds"] == json.loads((run / "summary.json").read_text())["wall_seconds"]


def test_a_coordinator_answers_one_viewer_at_a_time(tmp_path):
    """Else many viewers would take all threads of the run."""
    busy, together = threading.Lock(), threading.Event()

    def page(question):
        if not busy.acquire(blocking=False):
            together.set()
            return b"{}"
        together.wait(0.05)
        busy.release()
        return b"{}"

    run = Run(tmp_path)
    server = ServerThread(make_app(run, "secret", CollectorRegistry(), page))
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE) as client, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: client.get("/v1/page/overview").status_code, range(8)))
    server.close()
    run.history.close()
    assert replies == [200] * 8
    assert not together.is_set()


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2Fpage_files.py",
        "/static/..%2f..%2f..%2fetc%2fpasswd",
        "/api/v1/runs/..%2F..%2Fetc/overview",
        "/api/v1/runs/../../job.json",
        "/api/v1/runs/%2Fetc/overview",
        "/job.json",
    ],
)
def test_no_path_leads_out_of_the_runs(client, path):
    reply = client.get(path)
    assert reply.status_code == 404
    assert set(reply.json()) == {"detail"}


@pytest.mark.parametrize("question", ["overview", "live", "changes"])
def test_a_run_that_is_not_there_is_one_sentence(client, run, question):
    reply = client.get(f"/api/v1/runs/nowhere/{question}")
    assert reply.status_code == 404
    assert reply.json() == {"detail": f"there is no run of this name in {run.parent}"}


@pytest.mark.parametrize(
    "path", ["/", "/static/main.js", "/api/v1/about", "/api/v1/runs", "/api/v1/changes", "/nothing"]
)
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
def test_nobody_reads_anything_without_the_token(client, path, token):
    """Every user of the machine can connect to 127.0.0.1."""
    signs = {} if token is None else {"Authorization": f"Bearer{token and ' '}{token}", "Cookie": f"token={token}"}
    reply = httpx.get(client.base_url.join(path), params={} if token is None else {"token": token}, headers=signs)
    assert reply.status_code == 401
    assert "the whole address that `dovetail ui` printed" in reply.json()["detail"]
    assert client.base_url.host == "127.0.0.1"


def test_a_browser_keeps_the_token_out_of_the_addresses(client, run):
    with httpx.Client(base_url=client.base_url) as browser:
        first = browser.get("/", params={"token": TOKEN})
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert {"httponly", "samesite=lax"} <= set(first.headers["set-cookie"].lower().split("; "))
        for path in ("/", "/static/main.js", f"/api/v1/runs/{run.name}/overview"):
            assert browser.get(path).status_code == 200
    assert httpx.get(client.base_url.join("/api/v1/runs"), params={"token": TOKEN}).status_code == 200


def test_a_name_that_leads_here_is_refused(client):
    """Else a page of another site could read the runs (DNS rebinding)."""
    assert client.get("/api/v1/runs", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/api/v1/runs", headers={"Host": "localhost:1234"}).status_code == 200


def test_scripts_come_from_this_server_alone(client):
    reply = client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in reply.text
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")


def test_the_demo_plays_a_run_that_ends(tmp_path):
    run = unpack(tmp_path)
    documents, seen = PageDocuments(RunFolder(run.folder)), []

    async def pause(seconds):
        seen.append((seconds, ask(documents, "overview", alive=None)))

    asyncio.run(play(run, pause))
    assert sum(seconds for seconds, _ in seen) < 60
    states = [(found["state"], found["stage"], found["done"]) for _, found in seen[-3:]]
    assert states[0] == ("running", "ppo", states[0][2])
    assert ask(documents, "overview")["state"] == "succeeded"
    assert {path.name for path in tmp_path.iterdir()} > {run.folder.name}


@pytest.mark.parametrize(
    ("events", "port"),
    [
        ([], None),
        ([{"event": "coordinator.ready", "host": "127.0.0.1", "port": 1234}], 1234),
        ([{"event": "coordinator.ready", "host": "10.0.0.1", "port": 1234}], None),
        ([{"event": "coordinator.ready", "host": "127.0.0.1", "port": "1@evil.example"}], None),
    ],
)
def test_a_runs_token_is_sent_to_this_machine_only(events, port):
    assert coordinator_port(events) == port


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    found = CliRunner().invoke(cli, ["ui", str(tmp_path / "nowhere")])
    assert (found.exit_code, found.output) == (
        2,
        f"Error: {tmp_path / 'nowhere'} is no folder; give the one that holds your runs, or --demo\n",
    )
