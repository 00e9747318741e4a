"""What shows a run: final table, charts, report, progress, dialogue text."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dovetail.coordinator.data.text.chat_template import HumanAssistant
from dovetail.coordinator.reporting import report
from dovetail.coordinator.reporting.page.page_documents import encode
from dovetail.coordinator.reporting.report import write_report
from dovetail.coordinator.reporting.run_summary import read_summary, show, summary_table
from dovetail.coordinator.reporting.summary_rows import binomial_p, duration, outcome, rows
from dovetail.coordinator.reporting.time_left import TimeLeft, position
from dovetail.launch.local.progress_bars import Bars, Lines, describe_metrics, time_left
from dovetail.manifest.types import RLHFJobSpec, Stage
from dovetail.protocol.errors import RunError
from dovetail.tools.serving.chat import until_stop
from helpers.finished_runs import SUMMARY, finished_run, history_of, page_data, report_answers


def as_text(table):
    out = StringIO()
    Console(file=out, width=110).print(table)
    return out.getvalue()


# ---------------------------------------------------------------- table


def test_the_table_says_what_changed_and_where_time_went():
    text = as_text(summary_table(SUMMARY))
    for wanted in (
        r"SFT loss, held out\s+│\s+6\.234 │\s+1\.877",
        r"93\.4% of 256 pairs \(p < 0\.001\)",
        r"Reward per sample\s+│\s+0\.123 ± 0\.045 │\s+1\.987 ± 0\.067",
        r"KL to reference.*0\.001 ± 0\.001 │\s+2\.340 ± 0\.210",
        r"Quality of 64 held-out answers\s+│\s+0\.475 ± 0\.060 │\s+0\.931 ± 0\.020",
        r"Samples per second.*13\.37",
        r"Wall time.*4 min 07 s",
        r"generation\s+│\s+50\.0% │\s+50\.0 s",
        r"other\s+│\s+2\.0% │\s+2\.0 s",
        r"Seed.*7",
    ):
        assert re.search(wanted, text), wanted


def test_a_run_with_a_lag_says_what_its_phases_would_take_one_after_the_other():
    overlap = {"iterations": 4, "seconds": 80.0, "synchronous_seconds": 128.0}
    out = StringIO()
    show(Console(file=out, width=110), SUMMARY | {"overlap": overlap})
    assert re.search(r"PPO iterations, all together\s+│\s+│\s+1 min 20 s", out.getvalue())
    assert re.search(r"phases one after the other\s+│\s+160\.0% │\s+2 min 08 s", out.getvalue())
    told = "an iteration took 20.0 s; one after the other, its phases take 32.0 s."
    assert told in out.getvalue()


@pytest.mark.slow
@given(st.sets(st.sampled_from(sorted(SUMMARY))))
def test_any_part_of_the_summary_may_be_missing(missing):
    part = {k: v for k, v in SUMMARY.items() if k not in missing}
    as_text(summary_table(part))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60.0, "1 min 00 s"), (247.4, "4 min 07 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_binomial_p():
    assert binomial_p(5, 10) == pytest.approx(0.623046875)
    assert binomial_p(10, 10) == pytest.approx(2**-10)
    assert binomial_p(0, 10) == 1.0
    assert binomial_p(1200, 2000) < 1e-10


def test_summary_missing_or_damaged(tmp_path):
    with pytest.raises(RunError, match="has not finished"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RunError, match="cannot read"):
        read_summary(tmp_path)


# ---------------------------------------------------------------- report


def overview_of(run, **summary):
    run.mkdir(exist_ok=True)
    (run / "summary.json").write_text(json.dumps(summary))
    write_report(run)
    return report_answers(run)["overview"]


def test_the_report_has_what_the_page_asks_for(tmp_path):
    run = finished_run(tmp_path / "run")
    page = write_report(run).read_text()
    found = page_data(page)
    assert found["about"]["run"] == "run"
    assert found["about"]["left_out"] == ""
    answers = found["answers"]
    assert ["Quality of 64 held-out answers", "0.475 ± 0.060", "0.931 ± 0.020"] in answers["overview"]["results"]
    assert ["Time of stage sft", "", "31.0 s"] in answers["overview"]["results"]
    assert {row["stage"] for row in answers["history/0"]["rows"]} == {"sft", "reward", "ppo"}
    assert [row["step"] for row in answers["history/0"]["rows"] if row["stage"] == "ppo"] == list(range(1, 31))
    last = answers["overview"]["trace_iterations"][-1]
    assert {"trainer-1", "small-0-scorer"} <= {lane["process"] for lane in answers[f"timeline/{last}"]["lanes"]}


def test_the_report_loads_nothing_and_runs_its_own_script_only(tmp_path):
    page = write_report(finished_run(tmp_path / "run")).read_text()
    assert "default-src 'none'; script-src 'sha256-" in page
    head = page[: page.index("<style>")]
    assert not re.search(r'(src|href)="(?!data:)', head)
    assert not re.search(r"^import |^export ", page, re.MULTILINE), "a file has no modules to import"


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!-- <script>", "\u2028\u2029 \x00 \ud800"])
def test_no_text_ends_the_reports_data(tmp_path, text):
    overview_of(tmp_path, state="failed", reason=text)
    page = (tmp_path / "report.html").read_text()
    data = page[page.index('id="data"') :]
    assert data.count("<") == 3, "the end of the data, of the body and of the page"
    assert not set("\u2028\u2029\x00") & set(data)
    assert page_data(page)["answers"]["overview"]["reason"] == text.replace("\ud800", "?")


def test_the_report_of_a_long_run_is_small_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_BYTES", 150_000)
    run = finished_run(tmp_path / "run", iterations=400)
    with (run / "history.jsonl").open("a") as file:
        for k in range(401, 3001):
            row = {"stage": "ppo", "step": k, "time": float(k), "metrics": {"reward": 1 / k, "kl": k / 7}}
            file.write(json.dumps(row) + "\n")
    answers = page_data(write_report(run).read_text())
    assert len(encode(answers)) < 200_000
    steps = [row["step"] for row in answers["answers"]["history/0"]["rows"] if row["stage"] == "ppo"]
    assert 100 < len(steps) < 2000
    assert steps[-1] == 3000
    assert re.search(r"This file has every \d+th step", answers["about"]["left_out"])


def test_the_report_of_long_samples_still_has_timelines_and_every_table(tmp_path, monkeypatch):
    """Whole samples of thousands of tokens took all the room, and the page said that no iteration had ended."""
    run = finished_run(tmp_path / "run")
    (run / "samples").mkdir()
    for k in (1, 2, 29, 30):
        row = {"iteration": k, "prompt_index": 0, "prompt": "?", "tokens": 4096, "reward": 1.0}
        rows = [row | {"sample_index": n, "response": "<b>" * 60_000} for n in range(30)]
        damaged = {"iteration": k, "prompt": "?", "response": "a row of something else"}
        text = "".join(json.dumps(each) + "\n" for each in [*rows, damaged])
        (run / f"samples/iteration-{k:04d}.jsonl").write_text(text)
    monkeypatch.chdir(run)
    page = write_report(Path()).read_text()
    assert len(page) < report.MOST_BYTES + 200_000, "with the page itself"
    found, asked = page_data(page), page_data(page)["answers"]
    assert found["about"]["run"] == "run", "it has a name when its folder is the current one"
    assert asked["overview"]["trace_iterations"] == [29, 30]
    assert asked["overview"]["sample_iterations"] == [1, 2, 29, 30]
    assert {"timeline/30", "timeline/29", "samples/1", "samples/30", "events"} <= set(asked)
    assert any(question.startswith("sample/30/") for question in asked)


def test_the_report_shows_the_method_the_manifest_and_the_learning_rates(tmp_path):
    run = finished_run(tmp_path / "run")
    manifest = {"apiVersion": "dovetail.dev/v1beta1", "kind": "RLHFJob", "metadata": {"name": "sums"}}
    critic = {"learningRate": 3e-6}
    settings = {"advantage": "grpo", "samplesPerPrompt": 8, "actorOptimizer": {"learningRate": 2e-6}}
    job = spec(**settings, criticOptimizer=critic).model_dump(mode="json", by_alias=True)
    (run / "job.json").write_text(json.dumps(manifest | {"spec": job}))
    told = json.loads((run / "summary.json").read_text())
    fusion = {"setting": "Auto", "threshold": None, "samples_migrated": 22}
    told |= {"method": "GRPO", "versions": {"dovetail": "1.2.3", "torch": "9.9"}, "fusion": fusion}
    (run / "summary.json").write_text(json.dumps(told))
    write_report(run)
    found = report_answers(run)["overview"]
    facts = dict(found["facts"])
    assert found["method"] == "GRPO"
    assert facts["Manifest"] == "sums (RLHFJob dovetail.dev/v1beta1)"
    assert facts["Learning rates"] == "SFT 1e-05 (Cosine), reward model 1e-05 (Cosine), actor 2e-06 (Cosine)"
    assert found["versions"] == {"dovetail": "1.2.3", "torch": "9.9"}
    assert "learningRate: 2.0e-06" in found["manifest"]
    # 22 samples migrated, whatever the last iteration did.
    assert ["Fusion: samples migrated, all iterations", "", "22"] in found["results"]


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ('{"metadata": {"name": "sums"}}', "sums"),
        ('{"metadata": {}}', "run"),
        ('{"metadata": "sums"}', "run"),
        ("[]", "run"),
        ('{"metadata": {"na', "run"),
        (None, "run"),
    ],
)
def test_a_report_without_a_job_has_its_folders_name(tmp_path, job, name):
    run = tmp_path / "run"
    run.mkdir()
    if job is not None:
        (run / "job.json").write_text(job)
    assert overview_of(run)["name"] == name


def test_history_keeps_the_last_line_of_a_step_and_passes_over_damage(tmp_path):
    lines = [
        '{"stage":"ppo","step":1,"time":1,"metrics":{"reward":1}}',
        '{"stage":"ppo","step":1,"time":2,"metrics":{"reward":2}}',
        "[]",
        '{"stage":"ppo","ste',
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    assert history_of(tmp_path) == {"ppo": {1: {"reward": 2}}}
    overview_of(tmp_path)
    assert len(report_answers(tmp_path)["history/0"]["rows"]) == 1


# ---------------------------------------------------------------- progress


def status(**fields):
    return {
        "state": "running",
        "stage": "ppo",
        "iteration": 3,
        "total_iterations": 8,
        "phase": "training",
        "metrics": {},
    } | fields


def test_position():
    assert position({"stage": None}) is None
    assert position(status()) == (Stage.PPO, 2, 8)
    assert position(status(phase=None)) == (Stage.PPO, 3, 8)
    assert position({"stage": "sft", "step": 5, "total_steps": 9}) == (Stage.SFT, 5, 9)


def test_metrics_in_words():
    assert describe_metrics(Stage.PPO, {"reward": 1.5, "reward_ci95": 0.25, "kl": 0.1, "other": 3}) == (
        "reward 1.500 ± 0.250, KL 0.100"
    )
    assert describe_metrics(Stage.REWARD, {"accuracy": 0.75}) == "accuracy 75.0%"
    assert describe_metrics(Stage.SFT, {"loss": None}) == ""


def spec(**ppo):
    return RLHFJobSpec.model_validate({"groups": [{"name": "a", "roles": ["trainer", "rollout"]}], "ppo": ppo})


def test_lines_without_a_terminal():
    out, now = StringIO(), [0.0]
    lines = Lines(spec(advantage="grpo"), Console(file=out, width=200), every_seconds=5.0, clock=lambda: now[0])
    with lines:
        for step in range(1, 11):
            now[0] += 1.0
            lines.update({"stage": "sft", "step": step, "total_steps": 10, "metrics": {"loss": 2.0}, "message": "m"})
        for _ in range(2):
            lines.update(status(iteration=1, phase=None, metrics={"reward": 0.5}, seconds_left=127.0))
        lines.finish({"progress": {"stage": "ppo", "done": 8}})
    assert out.getvalue().splitlines()[1:] == [
        "m",
        "SFT: step 1 of 10: loss 2.000",
        "SFT: step 6 of 10: loss 2.000",
        "SFT: step 10 of 10: loss 2.000",
        "GRPO: iteration 1 of 8: reward 0.500; about 2 min left",
        "GRPO: iteration 8 of 8",
    ]


def test_evaluations_are_told_once():
    console = Console(file=StringIO(), width=200)
    with Lines(spec(), console) as lines:
        for iteration, mean in ((0, 0.5), (5, 0.75), (5, 0.75), (10, 0.625)):
            best = {"iteration": min(iteration, 5)}
            metrics = {"exactMatch": {"mean": mean, "ci95": 0.125}, "reward": {"mean": 1.0, "ci95": 0.0}}
            found = {"iteration": iteration, "metric": "exactMatch", "metrics": metrics, "best": best}
            if iteration == 0:
                found["before_sft"] = {"exactMatch": {"mean": 0.125, "ci95": 0.0}}
            lines.update(status(iteration=iteration, evaluation=found))
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("evaluation")]
    assert told == [
        "evaluation before the first iteration: exactMatch 0.5 ± 0.12 (before SFT 0.125), reward 1 ± 0",
        "evaluation after iteration 5: exactMatch 0.75 ± 0.12, reward 1 ± 0; the highest exactMatch so far",
        "evaluation after iteration 10: exactMatch 0.625 ± 0.12, reward 1 ± 0",
    ]


def test_bars_on_a_terminal():
    out = StringIO()
    with Bars(
        spec(advantage="rloo", iterations=20), Console(file=out, width=160, force_terminal=True, legacy_windows=False)
    ) as bars:
        bars.update({"state": "starting", "stage": None})
        bars.update({"state": "running", "stage": "sft", "step": 4, "total_steps": 10, "metrics": {"loss": 1.25}})
        bars.update(status(samples_done=5, samples_total=64, message="something [odd]"))
        bars.tell("gen-0 died")
        bars.update(status(iteration=7, phase="training", metrics={"reward": 1.0}, stage_seconds_left=41.0))
        # The job ended early, and the last status came before that.
        bars.finish({"progress": {"stage": "ppo", "done": 8}})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "something [odd]" in text
    assert "gen-0 died" in text
    last = text[text.rindex("SFT") :]
    assert "10/10" in last
    assert "8/8" in last
    assert "reward 1.000" in last
    assert "RLOO" in last
    assert "left" not in last


def test_the_time_left_in_words():
    assert time_left(status(seconds_left=None, stage_seconds_left=41.0)) == "about 40 s left in this stage"
    assert time_left(status(seconds_left=8000.0, stage_seconds_left=41.0)) == "about 2 h 13 min left"
    assert time_left(status(seconds_left=None)) == ""


def test_the_time_that_is_left_is_that_of_the_last_steps():
    estimate = TimeLeft()
    assert estimate.left(0.0) is None
    for done, now in enumerate((0.0, 30.0, 40.0, 50.0)):  # the first step compiles
        estimate.see(Stage.PPO, done, 10, now)
    assert estimate.left(50.0) == pytest.approx(70.0)
    assert estimate.left(54.0) == pytest.approx(66.0)
    estimate.see(Stage.PPO, 3, 3, 55.0)
    assert estimate.left(56.0) == 0.0, "the job ends early"
    estimate.see(Stage.REWARD, 0, 5, 60.0)
    assert estimate.left(61.0) is None


@pytest.mark.parametrize("begun", [0, 7], ids=["new", "resumed"])
def test_the_first_step_is_not_the_rate_of_the_others(begun):
    """It compiles, so a stage of a minute would last for hours."""
    estimate = TimeLeft()
    estimate.see(Stage.SFT, begun, 1000, 0.0)
    estimate.see(Stage.SFT, begun + 1, 1000, 20.0)
    assert estimate.left(20.0) is None
    estimate.see(Stage.SFT, begun + 2, 1000, 20.06)
    assert estimate.left(20.06) == pytest.approx((998 - begun) * 0.06)


def test_a_night_between_two_steps_is_not_the_rate_of_the_others():
    estimate = TimeLeft()
    for step in range(10):
        estimate.see(Stage.PPO, step, 100, 30.0 * step + (36000.0 if step >= 5 else 0.0))
    assert estimate.left(36270.0) == pytest.approx(91 * 30.0)


def figure(mean, ci95=0.03):
    return {"mean": mean, "ci95": ci95}


def evaluated(before, after, **more):
    return {"evaluation": {"prompts": 64, "quality": {"before_ppo": before, "after_ppo": after}, **more}}


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (evaluated(figure(0.64), figure(0.9)), "PPO raised held-out quality from 0.64 to 0.90."),
        (evaluated(figure(0.9), figure(0.64)) | {"method": "GRPO"}, "GRPO lowered held-out quality from 0.90 to 0.64."),
        (
            evaluated(figure(0.2), figure(0.199), reward={"before_ppo": figure(-1.87), "after_ppo": figure(1.83)}),
            "PPO did not clearly change held-out quality (0.200 before, 0.199 after) and raised held-out reward from "
            "-1.87 to 1.83.",
        ),
        (evaluated(figure(0.001, 0.0), figure(0.002, 0.0)), "PPO raised held-out quality from 0.001 to 0.002."),
        (evaluated(figure(0.5), figure(0.5)), "PPO did not clearly change held-out quality (0.50 before, 0.50 after)."),
        (
            {"ppo": {"reward_first": figure(0.0), "reward_last": figure(0.7)}},
            "PPO raised the reward per sample from 0.00 to 0.70. That is on the prompts of training: no held-out "
            "prompts were evaluated.",
        ),
        # It was stopped before the last evaluation.
        (
            evaluated(figure(0.5), None) | {"ppo": {"reward_first": figure(0.5), "reward_last": figure(0.1)}},
            "PPO lowered the reward per sample from 0.50 to 0.10.",
        ),
        (
            {"dpo": {"method": "KTO", "loss_before": 0.5, "loss_after": 0.41}},
            "KTO lowered the held-out loss from 0.50 to 0.41.",
        ),
        ({"sft": {"loss_before": 6.221, "loss_after": 0.576}}, "SFT lowered the held-out loss from 6.22 to 0.58."),
        (
            {"reward_model": {"accuracy": 0.847}},
            "The reward model prefers the chosen response in 84.7% of the held-out pairs.",
        ),
        ({"sft": {"loss_after": 0.5}}, ""),
        ({"ppo": {"reward_first": figure(0.5), "reward_last": figure(0.5)}, "progress": {"done": 1}}, ""),
        ({"sft": {"loss_before": 6.2, "loss_after": float("nan")}}, ""),
        ({"evaluation": None, "state": "failed"}, ""),
    ],
)
def test_a_sentence_says_what_the_run_changed(summary, said, tmp_path):
    assert outcome(summary) == said
    out = StringIO()
    show(Console(file=out, width=60), summary)
    assert (said in out.getvalue()) if said else "raised" not in out.getvalue()
    assert overview_of(tmp_path, **summary)["outcome"] == said


@pytest.mark.parametrize(
    ("ppo", "name"),
    [
        ({}, "PPO"),
        ({"advantage": "grpo", "samplesPerPrompt": 8}, "GRPO"),
        ({"advantage": "grpo", "normalizeStd": False, "lossAggregation": "Constant"}, "Dr. GRPO"),
        ({"advantage": "grpo", "loss": "gspo"}, "GSPO"),
        ({"advantage": "reinforce++-baseline"}, "REINFORCE++ with a baseline"),
        ({"loss": "mine:loss", "advantageFunction": "mine:adv"}, "PPO with mine:loss and mine:adv"),
    ],
)
def test_methods_have_the_names_that_people_use(ppo, name):
    assert spec(**ppo).ppo.method == name


# ---------------------------------------------------------------- chat


def test_dialogue_as_text():
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "bye")]
    assert HumanAssistant().prompt([{"role": who, "content": said} for who, said in turns]) == (
        "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant:"
    )


@given(st.text("ab\nHuman:Assit ", max_size=60), st.booleans(), st.lists(st.integers(1, 5), min_size=1))
def test_a_reply_ends_where_the_next_turn_begins_however_it_is_cut(words, turn, cuts):
    text = words + ("\n\nHuman: next" if turn else "")
    ends = [at for stop in ("\n\nHuman:", "\n\nAssistant:") if (at := text.find(stop)) >= 0]
    expected = text[: min(ends)] if ends else text
    pieces, at, k = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + cuts[k % len(cuts)]])
        at += cuts[k % len(cuts)]
        k += 1
    assert "".join(until_stop(pieces)) == expected


VERDICT = {"reason": "RewardsEqual", "message": "all rewards are 1, so no response is better than another"}


def test_a_warning_is_told_once_and_when_it_is_over():
    console = Console(file=StringIO(), width=200)
    with Lines(spec(), console) as lines:
        for iteration, verdicts in ((1, []), (2, [VERDICT]), (2, [VERDICT]), (3, [VERDICT]), (4, []), (5, [])):
            health = {"iteration": iteration, "verdicts": verdicts}
            lines.update({"stage": "ppo", "iteration": iteration, "total_iterations": 9, "health": health})
    told = [line for line in console.file.getvalue().splitlines() if "RewardsEqual" in line]
    assert told == [
        f"Warning: iteration 2 is unhealthy (RewardsEqual): {VERDICT['message']}",
        "iteration 4: no longer RewardsEqual",
    ]


def test_the_table_says_which_iterations_were_unhealthy():
    known = {"first": 2, "last": 5, "count": 3, "message": VERDICT["message"]}
    health = {"iterations": 9, "unhealthy": 3, "verdicts": [], "reasons": {"RewardsEqual": known}}
    text = as_text(summary_table(SUMMARY | {"health": health}))
    assert re.search(r"Unhealthy iterations\W+3 of 9", text)
    assert re.search(r"RewardsEqual\W+iteration 2\W+iteration 5, 3 in all", text)
    out = StringIO()
    show(Console(file=out, width=80), SUMMARY | {"health": health, "state": "failed", "reason": "no [bold] idea"})
    assert out.getvalue().startswith("failed: no [bold] idea\n")
    assert out.getvalue().endswith(f"Warning: RewardsEqual (iteration 5): {VERDICT['message']}\n")


def test_a_stage_of_preferences_is_called_by_its_loss() -> None:
    found = {"loss_before": 0.5, "loss_after": 0.4, "accuracy": 0.75}
    assert rows({"dpo": {**found, "method": "KTO", "responses": 8.0}}) == [
        ("KTO loss, held out", "0.500", "0.400"),
        ("KTO accuracy, held out", "", "75.0% of 8 responses"),
    ]
    assert rows({"dpo": {**found, "pairs": 8.0}})[1][0] == "DPO accuracy, held out", "of an earlier release's run"
