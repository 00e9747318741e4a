"""`dovetail run` without a manifest: the manifest that it means is printed, valid and complete."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dovetail.cli.common import one_line_options
from dovetail.cli.main import cli
from dovetail.gpus import nvidia_driver
from dovetail.gpus.nvidia_driver import Device, Driver, NoDriver
from dovetail.manifest.checks.rules import check
from dovetail.manifest.checks.validation import parse_manifest
from dovetail.manifest.documents import parse
from dovetail.manifest.training_types import AUTO_LAG
from dovetail.planner.make_plan import make_plan
from dovetail.tools.one_line import METHODS, OneLine, document, product_label
from helpers.model_folder import llama_shapes, write_weights

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
H100 = one_line_options.GPUs("NVIDIA-H100-80GB-HBM3", 3, 80 * 2**30)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, data and a reward, on a machine without GPUs."""

    def no_driver() -> Driver:
        raise NoDriver("none")

    monkeypatch.setattr(nvidia_driver, "ask_driver", no_driver)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-Model").mkdir()
    (tmp_path / "my-Model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "my-Model/tokenizer.json").write_text("{}")
    write_weights(tmp_path / "my-Model/model.safetensors", llama_shapes(CONFIG))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    (tmp_path / "rewards.py").write_text(
        "def correct(prompts, responses, answer):\n    return [1.0 for _ in prompts]\n"
    )
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


GRPO = ("--method", "grpo", "--model", "my-Model", "--prompts", "prompts.jsonl", "--reward", "rewards:correct")


def test_the_printed_manifest_is_a_job_of_its_own(here: Path) -> None:
    done = run(*GRPO, "--print-only", "--set", "spec.ppo.iterations=3", "--seed", "7")
    assert done.exit_code == 0, done.output
    (here / "job.yaml").write_text(done.stdout)
    spec = yaml.safe_load(done.stdout)["spec"]
    assert spec["models"]["actor"]["source"] == {"path": "my-Model"}
    assert spec["models"]["reward"] == {"function": "rewards:correct"}
    assert (spec["ppo"]["advantage"], spec["ppo"]["iterations"], spec["seed"]) == ("grpo", 3, 7)
    assert spec["data"]["maxPromptTokens"] + spec["generation"]["maxTokens"] <= CONFIG["max_position_embeddings"]
    checked = CliRunner().invoke(cli, ["validate", "job.yaml"])
    assert checked.exit_code == 0, checked.output
    assert "grpo-my-model, stages ppo; 1 trainer rank, 1 rollouts" in checked.output


def test_the_run_is_that_of_the_printed_manifest_and_its_resume_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[Any, str]] = []
    monkeypatch.setattr("dovetail.cli.run.run_job", lambda job, *_, **more: ran.append((job, more["hint"])) or 0)
    first = run(*GRPO, "--set", "spec.ppo.iterations=3")
    assert first.exit_code == 0, first.output
    printed = parse(yaml.safe_load(first.stdout.split("\n\n", 1)[1]))
    job, hint = ran[0]
    assert job.spec.ppo.iterations == printed.spec.ppo.iterations == 3
    assert job.spec.models.reward.import_path == str(here)
    words = shlex.split(hint)
    assert (words[:2], words[-1]) == (["dovetail", "run"], "--resume")
    assert run(*words[2:-1]).exit_code == 0
    assert ran[1][0] == job
    monkeypatch.setattr("dovetail.cli.common.plan_inputs.local_profile", lambda path, folder: None)
    assert run(*GRPO, "--profile", "my times.json").exit_code == 0
    words = shlex.split(ran[2][1])
    assert words[words.index("--profile") + 1] == "my times.json"


@pytest.mark.parametrize("gpus", [None, H100])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_makes_a_manifest_without_mistakes(method: str, gpus: one_line_options.GPUs | None) -> None:
    files = {"d.jsonl", "p.jsonl", "q.jsonl"}
    own = {"sft": {"demonstrations": ["d.jsonl"]}, "dpo": {"preferences": ["p.jsonl"]}}
    data = own.get(method, {"prompts": ["q.jsonl"], "rewards": ("r:a", "r:b")})
    lines = [OneLine(method, "Qwen/Qwen2.5-0.5B", **data)]
    if method == "ppo":
        lines.append(OneLine(method, "a/b", ["d.jsonl"], ["p.jsonl"], ["q.jsonl"]))
    for line in lines:
        job = parse(document(line, frozenset(files), gpus))
        assert check(job.spec) == []
        assert next(group.gpu.product for group in job.spec.groups) == (gpus.product if gpus else None)
        if method not in own:
            assert job.spec.ppo.lag == AUTO_LAG
            assert gpus or make_plan(job.spec).lag == 0, "processes that share cores gain nothing"
            assert job.spec.ppo.method.replace(". ", "-").lower() == {"dapo": "grpo"}.get(method, method)


@pytest.mark.parametrize("gib", [24, 80])
def test_a_gpus_answers_have_room_for_a_thought_and_its_micro_batches_fit(here: Path, gib: int) -> None:
    """Every reasoning model is cut at a few hundred tokens. A smaller GPU gets fewer rows, not shorter answers."""
    line = OneLine("grpo", "my-Model", prompts=["prompts.jsonl"], rewards=("rewards:correct",))
    gpus = one_line_options.GPUs("NVIDIA", 1, gib * 2**30)
    spec = parse(document(line, frozenset({"my-Model", "prompts.jsonl"}), gpus, context=32_768)).spec
    assert spec.generation.max_tokens >= 4096
    assert spec.ppo.micro_batch_tokens == "Auto"
    tokens = spec.ppo.micro_batch_size * (spec.data.max_prompt_tokens + spec.generation.max_tokens)
    assert tokens <= 40_000 * gib / 80
    unknown = parse(document(line, frozenset(), gpus)).spec
    assert unknown.data.max_prompt_tokens + unknown.generation.max_tokens == 2048, "TinyLlama has no more"


@pytest.mark.parametrize(("kind", "method"), [("prompts", "grpo"), ("demonstrations", "sft"), ("preferences", "dpo")])
def test_no_record_of_a_file_is_cut(here: Path, kind: str, method: str) -> None:
    config = CONFIG | {"max_position_embeddings": 8192}
    (here / "my-Model/config.json").write_text(json.dumps(config))
    long = "Add 1234 and 5678. " * 200
    row = {"prompt": long, "response": long, "chosen": long, "rejected": "no", "answer": "4"}
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": "2 + 2 ="} | row | {"prompt": "short"}) + "\n")
    (here / "long.jsonl").write_text("{}\n" + json.dumps(row) + "\n")
    more = ("--reward", "rewards:correct") if method == "grpo" else ()
    found = run("--method", method, "--model", "my-Model", f"--{kind}", "long.jsonl", *more, "--print-only")
    data = yaml.safe_load(found.stdout)["spec"]["data"]
    limit = data["maxPromptTokens" if kind == "prompts" else "maxTokens"]
    assert len(long) // 2 <= limit <= 8192, "and it fits the model"


@pytest.mark.parametrize("gpus", [None, H100])
@pytest.mark.parametrize(("kind", "method"), [("prompts", "grpo"), ("demonstrations", "sft")])
def test_long_records_do_not_ask_more_of_a_hubs_model_than_it_has(
    kind: str, method: str, gpus: one_line_options.GPUs | None
) -> None:
    """Its context is known only when it is there. Then vLLM refuses a longer prompt, and training goes past the
    positions that it has learnt."""
    line = OneLine(method, "me/model", **{kind: ["long.jsonl"]}, rewards=("a:b",) if kind == "prompts" else ())
    spec = parse(document(line, frozenset({"long.jsonl"}), gpus, longest={kind: 60_000})).spec
    assert spec.data.max_prompt_tokens == 1024
    assert spec.data.max_tokens <= 2048
    assert kind == "demonstrations" or spec.data.max_prompt_tokens + spec.generation.max_tokens <= 2048


def test_the_methods_are_those_of_the_table_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| `(\{.*?\})` \|", page, re.MULTILINE))
    named = {name.split(",")[0].replace(". ", "-").lower(): yaml.safe_load(ppo) for name, ppo in rows.items()}
    for method, ppo in METHODS.items():
        if method not in ("sft", "dpo"):
            assert {k: v for k, v in named[method].items() if k != "overlong"} == ppo


def test_a_reward_may_be_a_file(here: Path) -> None:
    (here / "code").mkdir()
    (here / "rewards.py").rename(here / "code/rewards.py")
    done = run(*GRPO[:-1], "code/rewards.py:correct", "--print-only")
    assert done.exit_code == 0, done.output
    reward = yaml.safe_load(done.stdout)["spec"]["models"]["reward"]
    assert reward == {"function": "rewards:correct", "importPath": "code"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give a manifest (dovetail init writes one), or --method with --model and data"),
        (("--prompts", "prompts.jsonl"), "--prompts needs --method"),
        (("--method", "grpo"), "--method grpo needs --model"),
        (("job.yaml", "--reward", "a:b"), "--reward is for runs without a manifest"),
        (("--method", "sft", "--model", "my-Model"), "--method sft needs --demonstrations FILE"),
        (("--method", "dpo", *GRPO[2:]), "--method dpo does not read --prompts"),
        (("--method", "dpo", "--model", "my-Model"), "--method dpo needs --preferences FILE"),
        ((*GRPO[:-2],), "--method grpo needs --reward module:function, or --preferences FILE"),
        ((*GRPO, "--preferences", "p/q"), "give one of them"),
        ((*GRPO[:-1], "rewrads:correct"), "spec.models.reward.function: there is no module 'rewrads' in "),
        ((*GRPO[:-1], "my-Model/none.py:a"), "there is no module 'none'"),
        ((*GRPO[:-1], "correct"), "--reward correct: write it as module:function"),
        ((*GRPO, "--prompts", "nothing.jsonl"), "--prompts nothing.jsonl does not exist"),
        ((*GRPO, "--prompts", "data/promts.jsonl"), "--prompts data/promts.jsonl does not exist"),
        ((*GRPO, "--prompts", "nothing"), "--prompts nothing is no file, and no data set of a hub (owner/name)"),
        ((*GRPO, "--prompts", "my-Model/p"), "--prompts my-Model/p does not exist, but the folder my-Model does"),
        ((*GRPO[:3], "my-Model/x", *GRPO[4:]), "--model my-Model/x does not exist, but the folder my-Model does"),
        ((*GRPO[:3], "gpt2", *GRPO[4:]), "--model gpt2 is no folder, and no model of a hub (owner/name)"),
        ((*GRPO, "--set", "spec.ppo.iteration=3"), "spec.ppo.iteration is not a field; did you mean iterations?"),
    ],
)
def test_a_mistake_is_one_sentence(here: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stdout == ""


def test_this_machines_gpus_take_turns_at_training_and_generation(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(Device(i, "NVIDIA A100-SXM4-80GB", (8, 0), 80 * 2**30) for i in range(2))
    monkeypatch.setattr(nvidia_driver, "ask_driver", lambda: Driver((13, 0), devices))
    monkeypatch.setattr("dovetail.gpus.nvidia_driver.cuda_devices", lambda: ["0", "1"])
    done = run(*GRPO, "--print-only")
    assert done.exit_code == 0, done.output
    (group,) = parse_manifest(done.stdout).spec.groups
    assert (group.replicas, group.gpu.product, len(group.roles)) == (2, "NVIDIA-A100-SXM4-80GB", 2)
    on_cpus = run(*GRPO, "--print-only", "--cpu")
    assert all(group.on_cpu for group in parse_manifest(on_cpus.stdout).spec.groups)


def test_a_product_is_what_the_nodes_label_says() -> None:
    assert product_label("NVIDIA H100 80GB HBM3") == "NVIDIA-H100-80GB-HBM3"
