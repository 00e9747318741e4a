"""Every example of docs/extending.md, run as it stands there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from dovetail.coordinator.data import formats
from dovetail.coordinator.data.data_error import DataError
from dovetail.coordinator.data.records import Prompt
from dovetail.coordinator.data.sources import load
from dovetail.coordinator.rewards.calls import Call
from dovetail.coordinator.rewards.workers import Workers
from dovetail.manifest.model_families import MODEL_FAMILIES
from dovetail.manifest.types import DataFormat, DataSource, RewardModel, Stage
from dovetail.protocol.experience import Experience, advantages_of
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.wire import unpack
from dovetail.rollout import backend
from dovetail.rollout.serving import vllm_server as server
from helpers.fake_coordinator import TOKEN
from helpers.local_trainer import LocalTrainer
from helpers.patience import PATIENCE
from helpers.trainer_ranks import job, load_command, ppo_batch

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
SOURCES = Path(__file__).parents[3] / "src"
MOST_LINES = 30


def section(title: str) -> dict[str, str]:
    """The code blocks below a heading, by their language."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"```(python|yaml)\n(.*?)```", text, re.DOTALL))


def module(title: str, folder: Path) -> str:
    """Write the example's Python under the file name in its first line; returns the code."""
    code = section(title)["python"]
    name = re.match(r"# (\S+\.py)\n", code)
    assert name is not None, f"the example {title} begins with its file's name"
    (folder / name[1]).write_text(code)
    return code


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in re.findall(r"```python\n# (\w+)\.py\n", PAGE):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("title", re.findall(r"\n## (.+)\n", PAGE))
def test_an_example_is_short(title: str) -> None:
    assert len(section(title)["python"].splitlines()) < MOST_LINES


def trained(ppo: dict[str, Any], folder: Path) -> dict[str, float]:
    """Metrics of one PPO step of a tiny model."""
    with LocalTrainer(job(ppo={**ppo, "importPath": str(folder)})) as trainer:
        trainer.metrics(load_command(Stage.PPO))
        return trainer.metrics(trainer.step(Stage.PPO, 1, ppo_batch(1), ["actor", "critic"], 4, kl_coef=0.05))


@pytest.mark.slow
def test_a_loss(tmp_path: Path) -> None:
    module("A loss", tmp_path)
    metrics = trained(yaml.safe_load(section("A loss")["yaml"])["ppo"], tmp_path)
    assert metrics["loss/sequence_ratio"] == pytest.approx(1.0, abs=0.1)
    assert metrics["actor_grad_norm"] > 0


@pytest.mark.slow
def test_an_advantage(tmp_path: Path) -> None:
    code = module("An advantage", tmp_path)
    ppo = yaml.safe_load(section("An advantage")["yaml"])["ppo"]
    metrics = trained(ppo, tmp_path)
    assert metrics["advantage_std"] == pytest.approx(1.0, abs=1e-3)
    found: dict[str, Any] = {}
    exec(code, found)
    batch = Experience(1, [], [], unpack(ppo_batch(1)), config=job().spec.ppo, kl_coef=0.05)
    batch.set_advantages(*advantages_of(found["reinforce"], batch, "mine"))
    assert float(batch.arrays["advantages"][batch.mask].std()) == pytest.approx(1.0, abs=1e-3)


def test_a_reward(tmp_path: Path) -> None:
    module("A reward", tmp_path)
    reward = RewardModel.model_validate(
        {**yaml.safe_load(section("A reward")["yaml"])["models"]["reward"], "importPath": str(tmp_path)}
    )

    async def ask() -> list[float]:
        workers = Workers(reward, tmp_path)
        try:
            (function,) = await workers.open()
            assert function.needs == "Sample"
            call = Call(1, 0, ["2 + 2 =", "3 + 3 ="], ["It is 4", "It is 5"], {"answer": [4, 6]})
            return list((await workers.call(0, call)).rewards)
        finally:
            await workers.close()

    assert asyncio.run(ask()) == [1.0, 0.0]


def test_a_data_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    exec(section("A data source")["python"], found)
    asked_first = {"Alpaca": found["ALPACA"], **formats.FORMATS}
    monkeypatch.setattr(formats, "FORMATS", asked_first)
    rows = [{"instruction": "Add.", "input": "2 and 3", "output": "5"}, {"instruction": "Greet.", "input": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource(path="rows.jsonl")
    options: dict[str, Any] = {"field": "spec.data.prompts[0]", "base_dir": tmp_path, "cache_dir": tmp_path, "seed": 0}
    prompts = load(source, "prompts", **options)
    assert prompts[0] == Prompt("\n\nHuman: Add.\n\n2 and 3\n\nAssistant:", {"output": "5"})
    assert load(source, "demonstrations", **options)[0].response.strip() == "5"  # type: ignore[union-attr]
    with pytest.raises(DataError, match="needs records with chosen and rejected replies"):
        load(source, "preferences", **options)
    (tmp_path / "rows.jsonl").write_text(json.dumps({**rows[0], "instruction": ""}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'instruction' is missing or empty"):
        load(source, "prompts", **options)


@pytest.mark.slow
def test_a_data_source_in_its_place(tmp_path: Path) -> None:
    """The file and the line in the list, as the page says: formats.py imports the file, so that must not import it."""
    shutil.copytree(SOURCES / "dovetail/coordinator", tmp_path / "dovetail/coordinator")
    data = tmp_path / "dovetail/coordinator/data"
    module("A data source", data)
    text = (data / "formats.py").read_text()
    begin, entries = "\nfrom dovetail.", "    for each in (\n"
    text = text.replace(begin, f"\nfrom dovetail.coordinator.data.alpaca import ALPACA{begin}", 1)
    (data / "formats.py").write_text(text.replace(entries, f"{entries}        ALPACA,\n", 1))
    row = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
    code = f"from dovetail.coordinator.data import formats; print(formats.__file__, formats.detect({row}, ''))"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.split() == [str(data / "formats.py"), "Alpaca"], done.stderr


def test_the_manifest_names_the_formats_that_are_read() -> None:
    assert set(formats.FORMATS) == set(get_args(DataFormat))


def test_a_model_family() -> None:
    """The derived facts are those of the table, with which `dovetail model check` proves the family."""
    found: dict[str, Any] = {}
    exec(section("A model family")["python"], found)
    assert found["family"].causal_lm == "SmolLM3ForCausalLM"
    assert found["family"].linears == MODEL_FAMILIES["smollm3"].linears


def test_a_rollout_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server process hands the job's plan to the backend that its environment names."""
    module("A rollout backend", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    written = (
        "import json, sys\nfrom pathlib import Path\nPath(sys.argv[2], 'told.json').write_text(json.dumps(sys.argv))\n"
    )
    (tmp_path / "my_server.py").write_text(written)
    (tmp_path / "models" / "actor-config").mkdir(parents=True)
    (tmp_path / "models" / "actor-config" / "config.json").write_text("{}")
    (tmp_path / "job.json").write_text(job().model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text("{}")
    env = ProcessEnv("tiny", "rollouts-0", tmp_path, "http://127.0.0.1:1", TOKEN, "127.0.0.1", 81, 0, "rollouts", 0, 1)
    for name, value in {**env.write(), "DOVETAIL_ROLLOUT_BACKEND": "my_backend:Other"}.items():
        monkeypatch.setenv(name, value)
    assert server.main([]) == 0
    told = json.loads((tmp_path / "models" / "actor-config" / "told.json").read_text())
    assert told[1:] == ["--model", str(tmp_path / "models" / "actor-config"), "--port", "81", "--tensor-parallel", "1"]
    (pod,) = yaml.safe_load(section("A rollout backend")["yaml"])["groups"]
    assert pod["podTemplate"]["spec"]["containers"][0]["env"][0]["name"] == backend.VARIABLE
    monkeypatch.setenv(backend.VARIABLE, "no_such_backend:Other")
    assert server.main([]) == 2


def test_what_a_backend_must_offer_is_what_the_coordinator_asks_for() -> None:
    """Every route that the page names is asked for by the coordinator or the server's own registration."""
    routes = set(re.findall(r"`(?:GET |POST )?(/[a-z_/0-9]+)`", PAGE.split("## A rollout backend")[1]))
    root = Path(__file__).parents[3]
    sources = [
        *(root / "src/dovetail/coordinator").rglob("*.py"),
        root / "rollout_image/dovetail/rollout/serving/register.py",
        root / "src/dovetail/protocol/sample_stream.py",
    ]
    text = "".join(path.read_text() for path in sources)
    assert {route for route in routes if route not in text} <= {"/dovetail/info"}
    assert len(routes) == 14
    # The small servers that the page names have all of them but these, as the page says.
    small = sources[-1].read_text() + "".join(
        (root / name).read_text() for name in re.findall(r"`(tests/helpers/\w+\.py)`", PAGE)
    )
    assert {route for route in routes if f'"{route}"' not in small} == {
        "/health",
        "/dovetail/info",
        "/sleep",
        "/wake_up",
    }
