"""The calculator of the documentation in Chromium: the planner in the browser says what `dovetail plan` says."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from playwright.sync_api import Page, expect, sync_playwright

from dovetail.cli.main import cli
from dovetail.manifest.model_shape import ModelShape
from helpers.example_jobs import hub_configs
from helpers.patience import PATIENCE

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "docs" / "calculator"))

from answers.form import answer  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CONFIG = hub_configs("hh-rlhf")["actor"]
FORM = {
    "model": "",
    "config": CONFIG,
    "method": "grpo",
    "prompts": 16,
    "samples": 8,
    "steps": 2,
    "promptTokens": 256,
    "responseTokens": 512,
    "pools": [
        {"name": "pool-0", "product": "NVIDIA-A100-SXM4-80GB", "nodes": 1, "gpusPerNode": 4, "pricePerGPUHour": 2},
        {"name": "pool-1", "product": "NVIDIA-A10", "nodes": 4, "gpusPerNode": 1, "pricePerGPUHour": 0.5},
    ],
}


def rounded(value: Any) -> Any:
    """A JSON document whose floats have nine digits. Python 3.12 and later add floats more exactly."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def planned(manifest: str, folder: Path) -> Any:
    """What `dovetail plan` says of the manifest that the page gives, beside the model's folder."""
    (folder / "model").mkdir()
    for name in ("model/model.safetensors", "model/tokenizer.json", "prompts.jsonl", "rewards.py"):
        (folder / name).write_bytes(b"\x02" + bytes(7) + b"{}" if "safetensors" in name else b"{}")
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "job.yaml").write_text(manifest)
    done = CliRunner().invoke(cli, ["plan", str(folder / "job.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_answer_is_that_of_dovetail_plan(tmp_path: Path) -> None:
    found = answer(FORM)
    assert found["plan"] == planned(yaml.safe_dump(found["manifest"]), tmp_path)
    assert {pool.split("[")[0] for pool in (each["group"] for each in found["best"]["tasks"])} <= {"pool-0", "pool-1"}
    assert found["best"]["samplesPerDollar"] > 0
    assert set(found["peers"]) == {"verl", "TRL", "NeMo-RL"}
    assert "actor_rollout_ref.rollout.n=8\n" in found["peers"]["verl"]
    assert "grpo.num_generations_per_prompt=8\n" in found["peers"]["NeMo-RL"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pools": []}, "the inventory has no pools"),
        ({"config": {"model_type": "unheard"}}, "unheard"),
        ({"promptTokens": 0}, "spec.data.maxPromptTokens"),
        ({"config": CONFIG | {"num_hidden_layers": 4000}}, "add GPUs"),
    ],
)
def test_what_cannot_be_is_one_sentence(change: dict[str, Any], said: str) -> None:
    found = answer(FORM | change)
    assert list(found) == ["error"]
    assert said in found["error"]


def test_every_listed_model_has_the_size_of_its_name() -> None:
    models = json.loads((ROOT / "docs" / "calculator" / "models.json").read_text())
    for name, config in models.items():
        billions = float(re.search(r"-([\d.]+)B", name)[1])
        assert ModelShape.of(config).parameters() == pytest.approx(billions * 1e9, rel=0.25), name


# ---------------------------------------------------------------- in the browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation with its calculator. Skipped where no registry gives the files."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    subprocess.run([*build, "--site-dir", str(folder)], check=True, timeout=PATIENCE)
    gather = [sys.executable, str(ROOT / "hack" / "calculator.py"), str(folder)]
    done = subprocess.run(gather, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stderr)
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fill(page: Page, form: dict[str, Any]) -> None:
    page.locator("[name=model]").select_option(form["model"])
    page.locator("[name=config]").fill(json.dumps(form["config"]))
    page.locator("[name=method]").select_option(form["method"])
    for name in ("prompts", "samples", "steps", "promptTokens", "responseTokens"):
        page.locator(f"[name={name}]").fill(str(form[name]))
    for at, pool in enumerate(form["pools"]):
        if page.locator(".pool").count() <= at:
            page.get_by_role("button", name="more GPUs of another kind").click()
        here = page.locator(".pool").nth(at)
        here.locator("[name=product]").select_option(pool["product"])
        for name in ("nodes", "gpusPerNode", "pricePerGPUHour"):
            here.locator(f"[name={name}]").fill(str(pool[name]))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_the_page_plans_and_asks_nobody_else(url: str, tmp_path: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], timeout=240_000
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.set_default_timeout(PATIENCE * 1000)
        expect.set_options(timeout=PATIENCE * 1000)
        page.goto(f"{url}/calculator.html")
        page.get_by_text("The first plan loads").wait_for()
        fill(page, FORM)
        page.get_by_role("button", name="Plan", exact=True).click()
        manifest = page.locator("pre.manifest")
        manifest.wait_for()
        told = planned(manifest.inner_text(), tmp_path)
        seconds = told["prediction"]["iterationSeconds"]
        expect(page.locator("p.told")).to_contain_text(f"an iteration takes {seconds:.3g} s")
        expect(page.get_by_role("table", name="Layout").get_by_role("row")).to_have_count(
            1 + len(told["prediction"]["tasks"])
        )
        assert rounded(yaml.safe_load(manifest.inner_text())) == rounded(answer(FORM)["manifest"])
        impossible = FORM | {"config": CONFIG | {"num_hidden_layers": 4000}}
        fill(page, impossible)
        page.get_by_role("button", name="Plan", exact=True).click()
        expect(page.get_by_role("alert")).to_have_text(answer(impossible)["error"])
        browser.close()
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []
