"""The run page in Chromium: what a person sees and does. The server plays no part in it but to answer."""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from playwright.sync_api import expect, sync_playwright
from prometheus_client import CollectorRegistry

from dovetail.cli.main import cli
from dovetail.coordinator.reporting.report import write_report
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, SampleFiles, evaluation_files, read_rows
from dovetail.coordinator.serving.coordinator_routes import make_app
from helpers.cluster import wait_for
from helpers.demo_runs import TOKEN, append, demo_runs, serve_page
from helpers.example_jobs import EXAMPLES
from helpers.fake_jobs_api import JOBS, Api, Run, condition, job
from helpers.fake_kube import ServerThread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
expect.set_options(timeout=240_000)
HOSTILE = "</td><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # Root has no sandbox; a page without a GPU draws as well.
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=240_000,
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = demo_runs(folder)
    samples = run / "samples" / "iteration-000012.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[0] |= {"prompt": HOSTILE, "response": HOSTILE}
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def url(runs):
    server = serve_page(runs.parent)
    yield server.url
    server.close()


@contextmanager
def watched(browser, url, forgiven=(), **options):
    """A page that asks nobody but `url`, and has no errors but `forgiven`."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    found = context.new_page()
    asked, problems = [], []
    found.on("request", lambda request: asked.append(request.url))
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    found.set_default_timeout(240_000)
    yield found
    context.close()
    assert [address for address in asked if not address.startswith((url, "data:"))] == [], "asked somebody else"
    assert [problem for problem in problems if not problem.startswith(tuple(forgiven))] == []


@pytest.fixture
def page(browser, url):
    with watched(browser, url) as found:
        found.goto(f"{url}/?token={TOKEN}")
        assert found.url == f"{url}/", "the address keeps no token"
        yield found


def open_tab(page, url, run, *parts):
    page.goto(f"{url}/#/run/{'/'.join([run.name, *map(str, parts)])}")


@pytest.mark.slow
def test_a_finished_run_from_the_list_to_its_schedule(page, url, runs):
    page.goto(url)
    page.get_by_role("link", name=runs.name, exact=True).click()
    page.get_by_text("Healthy", exact=True).wait_for()
    # What is said of its health stands above all figures.
    assert (
        page.evaluate("document.querySelector('.note.good').compareDocumentPosition(document.querySelector('.facts'))")
        == 4
    )
    plan = page.get_by_role("table", name="Plan against actual")
    expect(plan.get_by_text("generation", exact=True)).to_have_count(1)
    planned = page.get_by_role("table", name="Plan against actual", exact=True)
    expect(planned.get_by_role("row")).to_have_count(2)
    expect(planned.get_by_text("–", exact=True)).to_have_count(0)
    page.get_by_text("PPO raised held-out quality from 0.67 to 0.93").wait_for()
    page.get_by_role("link", name="Timeline").click()
    lanes = page.locator("svg[data-lanes]")
    lanes.wait_for()
    wait_for("the bars", lambda: lanes.locator("rect").count() > 20)
    for kind in ("generation", "training", "actor forward"):
        expect(page.locator(".legend").get_by_text(kind, exact=True)).to_have_count(1)
    lanes.focus()
    page.keyboard.press("ArrowDown")
    page.locator("output", has_text=re.compile(r"coordinator.*: .* s, from")).wait_for()
    page.get_by_role("link", name="Schedule").click()
    page.get_by_text(re.compile("as run in iteration 12: ")).wait_for()
    expect(page.locator("svg[data-lanes]")).to_have_count(3)


@pytest.mark.slow
def test_metrics_zoom_together_and_are_filtered(page, url, runs):
    open_tab(page, url, runs, "metrics")
    chart = page.locator("svg[data-chart=reward]").first
    chart.wait_for()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    for name in ("reward", "kl"):
        shown = page.locator(f"svg[data-chart={name}] circle")
        wait_for(name, lambda shown=shown: 2 <= shown.count() < 12)
    chart.focus()
    page.keyboard.press("Escape")
    wait_for("all of it", lambda: page.locator("svg[data-chart=kl] circle").count() == 12)
    page.keyboard.press("/")
    page.keyboard.type("value_loss")
    wait_for("one figure", lambda: page.locator("figure:visible").count() == 1)


@pytest.mark.slow
def test_values_that_differ_by_rounding_alone_are_drawn(page, url, runs):
    even = runs.parent / "even"
    even.mkdir()
    rows = [{"stage": "ppo", "step": 1 + i, "time": 1.0, "metrics": {"ratio": 1.0 + i * 2.0**-52}} for i in range(2)]
    append(even / "history.jsonl", *rows)
    open_tab(page, url, even, "metrics")
    page.locator("svg[data-chart=ratio] circle").nth(1).wait_for()
    assert page.locator("svg[data-chart=ratio] text").count() < 20
    page.goto(url)  # nobody asks for it any more
    shutil.rmtree(even)


@pytest.mark.slow
def test_the_same_prompts_before_and_after_stand_side_by_side(page, url, runs):
    kept = SampleFiles(runs, 10**9)
    first = read_rows(evaluation_files(runs)[0])
    kept.write_evaluation(
        BEFORE_SFT, [{**row, "version": BEFORE_SFT, "response": f"Zzz {row['prompt_index']}"} for row in first]
    )
    open_tab(page, url, runs, "samples")
    page.get_by_label("Samples of").select_option("evaluations side by side")
    table = page.get_by_role("table", name="Answers side by side")
    last = max(evaluation_files(runs))
    for name in ("Prompt", "Answer before SFT", "Answer before PPO", f"Answer after iteration {last}"):
        table.get_by_role("columnheader", name=name, exact=True).wait_for()
    row = table.get_by_role("row").nth(1)
    expect(row.get_by_text("Zzz 0", exact=False)).to_have_count(1)
    expect(row.get_by_role("cell")).to_have_count(4)
    page.get_by_label("Filter samples").fill("zzz 1")
    wait_for("the filtered rows", lambda: 1 < table.get_by_role("row").count() < len(first))
    page.get_by_label("Samples of").select_option("evaluation before SFT")
    page.get_by_text("Zzz 1", exact=True).wait_for()  # the filter stays
    evaluation_files(runs)[BEFORE_SFT].unlink()


@pytest.mark.slow
def test_samples_are_sorted_and_one_is_read_token_by_token(page, url, runs):
    open_tab(page, url, runs, "samples")
    page.get_by_role("button", name="Sort by Reward").click()

    def in_order() -> bool:
        rewards = [float(text.rstrip(" =")) for text in page.locator("td[data-label=Reward]").all_inner_texts()]
        return len(rewards) > 1 and rewards == sorted(rewards, reverse=True)

    wait_for("the order", in_order)
    page.locator("td[data-label=Prompt] a").first.click()
    page.locator(".turn.assistant.learnt").wait_for()
    expect(page.locator(".turn.user.masked")).to_have_count(1)
    expect(page.locator(".tokens .masked")).to_have_count(1)
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text(re.compile(r"token 1 .*log-probability -?[\d.e-]+")).wait_for()
    expect(page.get_by_text(re.compile("begun on rollouts-"))).to_have_count(1)
    before = page.url
    page.keyboard.press("j")
    page.wait_for_url(lambda address: address != before)


@pytest.mark.slow
def test_a_models_text_is_shown_as_text(page, url, runs):
    open_tab(page, url, runs, "sample", 12, 0, 0)
    page.locator(".turn.assistant", has_text="</td><img src=x").wait_for()
    open_tab(page, url, runs, "samples", 12)
    page.locator("td", has_text="<script>").first.wait_for()
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "taken"


@pytest.mark.slow
def test_seeds_are_compared_on_one_axis(page, url, runs):
    page.goto(url)
    boxes = page.locator("input[data-run]")
    boxes.first.wait_for()
    for number in range(boxes.count()):
        boxes.nth(number).check()
    page.get_by_role("button", name=re.compile("Compare")).click()
    page.locator("svg[data-chart=reward]").wait_for()
    page.get_by_text(re.compile(r", \d seeds")).first.wait_for()


@contextmanager
def coordinator(folder):
    """A process that holds the run's store as a coordinator does, and the coordinator's routes. Gives its status."""
    (folder / "token").write_text("secret")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, folder / "store.lock"]
    run = Run(folder)
    server = ServerThread(make_app(run, "secret", CollectorRegistry()))
    ready = {"event": "coordinator.ready", "host": "127.0.0.1", "port": server.port, "time": time.time()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        append(folder / "events.jsonl", ready)
        yield run
        holder.stdin.close()
    server.close()
    run.history.close()


@pytest.mark.slow
def test_a_run_that_goes_on_is_followed_until_it_is_gone(page, url, runs):
    live = runs.parent / "live"
    live.mkdir()
    (live / "job.json").write_text((runs / "job.json").read_text())
    with coordinator(live) as run:
        run.document |= {"iteration": 3, "samples_done": 57, "samples_total": 128}
        run.add(1, reward=0.5)
        run.add(2, reward=0.6)
        open_tab(page, url, live, "overview")
        page.get_by_text("2 / 12").wait_for()
        page.get_by_text("iteration 3: generation, 57 of 128 samples").wait_for()
        run.add(3, reward=0.7)
        page.get_by_text("3 / 12").wait_for()
    # The process is gone, and left no summary.
    page.get_by_text("dovetail run --resume goes on").wait_for()
    page.goto(url)  # nobody asks for it any more
    shutil.rmtree(live)


@pytest.mark.slow
def test_the_list_shows_the_last_of_quick_changes(page, url, runs):
    ends = runs.parent / "ends"
    ends.mkdir()
    (ends / "job.json").write_text((runs / "job.json").read_text())
    row = page.locator("tr", has=page.get_by_role("link", name="ends", exact=True))
    with coordinator(ends) as run:
        page.goto(url)
        row.get_by_text("running", exact=True).wait_for()
        run.add(1, reward=0.5)
        row.get_by_text("1 / 12").wait_for()
    row.get_by_text("stopped", exact=True).wait_for()
    shutil.rmtree(ends)


@pytest.mark.slow
def test_400_pixels_keys_and_the_dark(page, url, runs):
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme="dark")
    for parts in (("overview",), ("metrics",), ("samples",), ("sample", 12, 1, 0), ("timeline",), ("schedule",)):
        open_tab(page, url, runs, *parts)
        page.locator("main h3:visible, main table:visible, main svg:visible").first.wait_for()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 400, f"{parts[0]} is {wide} pixels wide"
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", colour)[:3])) < 150, colour
    page.keyboard.press("2")
    page.wait_for_url(re.compile("/metrics$"))
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.goto(url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


@pytest.mark.slow
def test_the_report_is_the_page_without_a_server(browser, runs):
    """report.html in a browser that has no network. What it draws is what the page draws."""
    address = write_report(runs).as_uri()
    with watched(browser, address, offline=True) as page:
        page.goto(address)
        page.get_by_text("PPO raised held-out quality from 0.67 to 0.93").wait_for()
        page.get_by_text("Healthy", exact=True).wait_for()
        for title in ("Reward per sample", "Evaluation: quality"):
            page.locator(f"svg[data-chart='{title}'] circle").first.wait_for()
        page.locator("svg[data-lanes='Where the time of all iterations went'] rect").nth(4).wait_for()
        page.get_by_role("table", name="Bill", exact=True).get_by_text("training passes").wait_for()
        page.get_by_text(re.compile("processes for .* process seconds; .*% of them worked")).wait_for()
        page.get_by_text("By iteration", exact=True).click()
        expect(page.get_by_role("table", name="Bill by iteration").get_by_role("row")).to_have_count(13)
        page.get_by_text("The manifest", exact=True).click()
        page.locator("pre", has_text="kind: RLHFJob").wait_for()
        page.keyboard.press("2")
        page.locator("svg[data-chart=value_loss]").wait_for()
        page.get_by_text("Supervised fine-tuning", exact=True).wait_for()
        page.get_by_role("link", name="Samples").click()
        page.get_by_label("Samples of").select_option("evaluations side by side")
        page.get_by_role("columnheader", name="Answer after iteration 12", exact=True).wait_for()
        page.get_by_label("Samples of").select_option("iteration 12")
        page.locator("td[data-label=Prompt] a", has_text="<script>").first.click()
        page.locator(".turn.assistant", has_text="</td><img src=x").wait_for()
        page.locator(".tokens").wait_for()
        page.get_by_role("link", name="Timeline").click()
        wait_for("the bars", lambda: page.locator("svg[data-lanes] rect").count() > 20)
        page.get_by_role("link", name="Schedule").click()
        page.get_by_text(re.compile("as run in iteration 12: ")).wait_for()
        page.get_by_text("Other families").click()
        page.get_by_role("table", name="Families").get_by_text("RLHFuse").first.wait_for()
        page.get_by_role("link", name="Events").click()
        page.get_by_role("table", name="Events of the run").wait_for()
        # What the file lacks it says, and the link back leads to the run.
        page.goto(f"{address}#/run/{runs.name}/sample/12/127/9")
        page.get_by_text("This file does not hold it").wait_for()
        page.get_by_role("link", name="Dovetail").click()
        page.get_by_text("Healthy", exact=True).wait_for()
        assert page.title() == f"{runs.name}: Dovetail"
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.slow
def test_a_plan_is_drawn_without_a_server(browser, tmp_path):
    path, manifest = tmp_path / "plan.html", EXAMPLES / "quickstart-cluster.yaml"
    done = CliRunner().invoke(cli, ["plan", str(manifest), "--html", str(path)])
    assert done.exit_code == 0, done.output
    with watched(browser, path.as_uri(), offline=True) as page:
        page.goto(path.as_uri())
        page.locator("svg[data-lanes='Timeline by GPU'] rect").nth(8).wait_for()
        page.locator("svg[data-lanes=Phases] rect").nth(2).wait_for()
        page.get_by_role("table", name="Decided against").get_by_role("row").nth(1).wait_for()


@pytest.mark.slow
def test_no_script_but_the_pages_own_runs_in_a_report(browser, runs, tmp_path):
    """Even if a text got out of the data, the browser would not run it."""
    address = tmp_path / "report.html"
    text = write_report(runs).read_text()
    address.write_text(text.replace("<header", "<script>document.body.dataset.taken = 1</script><header", 1))
    with watched(
        browser, address.as_uri(), forgiven=["Executing inline script violates", "Refused to execute"]
    ) as page:
        page.goto(address.as_uri())
        page.get_by_text("Healthy", exact=True).wait_for()
        assert page.evaluate("document.body.dataset.taken") is None


# ---------------------------------------------------------------- on a cluster


@pytest.mark.slow
def test_a_job_on_a_cluster(browser, tmp_path, monkeypatch):
    """The same page by the status API: a job that runs, and one that is suspended and has no coordinator."""
    api = Api(demo_runs(tmp_path), monkeypatch)
    api.kube.rights.add(("ada", "get", "pods/log"))
    root = f"http://127.0.0.1:{api.port}"
    running = {
        "groups": [{"name": "rollouts", "desired": 4, "ready": 3}],
        "plan": {"placement": "Separation", "schedule": "fused", "rollouts": 4},
        "lastCheckpoint": {"stage": "ppo", "step": 8, "path": "checkpoints/ppo-000008"},
        "artifacts": [{"name": "sft", "claim": "job-files", "path": "models/sft"}],
    }
    api.kube.objects[f"{JOBS}/job"]["status"] |= running
    waits = condition("Suspended", message="spec.suspend is true")
    api.kube.objects[f"{JOBS}/later"] = job("later", "uid-2", conditions=[waits])
    api.kube.objects[f"{JOBS.replace('/lab/', '/other/')}/far"] = far = job("far", "uid-4", conditions=[waits])
    far["metadata"]["namespace"] = "other"
    api.kube.objects[f"{JOBS}/done"] = job("done", "uid-3", conditions=[condition("Completed")])
    api.kube.objects["/api/v1/namespaces/lab/events/e"] = {
        "metadata": {"name": "e"},
        "lastTimestamp": "2026-11-21T10:00:00Z",
        "reason": "Planned",
        "message": "the plan holds",
    }
    try:
        with watched(browser, root) as page:
            page.goto(root)
            page.get_by_text("Give a bearer token").wait_for()
            page.wait_for_load_state("networkidle")
        # Chromium itself writes a line for each answer that is an error, as of a job without a coordinator.
        with watched(browser, root, forgiven=["Failed to load resource"]) as page:
            page.goto(root)
            page.get_by_text("Give a bearer token").wait_for()
            page.get_by_label("Namespace").fill("")  # all of them
            page.get_by_label("Bearer token").fill("ada-token")
            page.get_by_role("button", name="Show").click()
            page.get_by_role("heading", name="Jobs in all namespaces").wait_for()
            page.get_by_role("link", name="other/far", exact=True).click()
            page.locator(".note", has_text="Suspended").get_by_text("spec.suspend is true").wait_for()
            page.get_by_role("link", name="Dovetail").click()
            page.get_by_label("Namespace").fill("lab")
            page.get_by_role("button", name="Show").click()
            page.get_by_role("heading", name="Jobs in namespace lab").wait_for()
            expect(page.get_by_role("link", name="other/far", exact=True)).to_have_count(0)
            api.kube.rights.discard(("ada", "list", "rlhfjobs"))
            page.get_by_label("Namespace").fill("")
            page.get_by_role("button", name="Show").click()
            page.get_by_text("user 'ada' may not list rlhfjobs.dovetail.dev in all namespaces").wait_for()
            api.kube.rights.add(("ada", "list", "rlhfjobs"))
            page.get_by_role("button", name="Show").click()
            page.get_by_role("link", name="lab/job", exact=True).click()
            page.get_by_text("Healthy", exact=True).wait_for()
            page.locator("svg[data-chart='Reward per sample'] circle").first.wait_for()
            page.get_by_role("link", name="Samples").click()
            page.locator("td[data-label=Prompt] a").first.wait_for()
            page.get_by_role("link", name="Job", exact=True).click()
            group = page.get_by_role("table", name="Groups").locator("tbody tr")
            expect(group.locator("td")).to_have_text(["rollouts", "3", "4"])
            for told in ("schedule fused", "checkpoints/ppo-000008", "models/sft", "the plan holds"):
                expect(page.locator("main")).to_contain_text(told)
            for tab in ("overview", "samples", "job"):
                page.goto(f"{root}/#/run/lab%2Flater/{tab}")
                page.locator(".note", has_text="Suspended").get_by_text("spec.suspend is true").wait_for()
            for tab in ("overview", "timeline"):
                page.goto(f"{root}/#/run/lab%2Fdone/{tab}")
                page.get_by_text("dovetail ui shows everything from the job's volume").wait_for()
        # An OIDC proxy before the API sends the user's token: nothing is pasted.
        by_proxy = {"Authorization": "Bearer ada-token"}
        with watched(browser, root, extra_http_headers=by_proxy) as page:
            # A tab without metrics does not ask for the rows of all iterations.
            with page.expect_request(re.compile("/rlhfjobs/job/events$")) as asked:
                page.goto(f"{root}/#/run/lab%2Fjob/samples")
            assert int(asked.value.headers["last-event-id"]) > 1000
            page.goto(f"{root}/#/run/lab%2Fjob/overview")
            page.get_by_text("Healthy", exact=True).wait_for()
    finally:
        api.close()
