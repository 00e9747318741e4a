"""`dovetail init`: what it writes is a valid job, and a reward function that can be called."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dovetail.cli.init_command import job_name
from dovetail.cli.main import cli
from dovetail.coordinator.data.formats import detect
from helpers.model_folder import save_model_folder

pytestmark = pytest.mark.usefixtures("proved_once")

LABELLED = '{"prompt": "2 + 2?", "response": "4", "label": true}'


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("sft", ["sft"]),
        ("ppo", ["sft", "reward", "ppo"]),
        ("grpo", ["ppo"]),
        ("dpo", ["sft", "dpo"]),
        ("agent", ["ppo"]),
    ],
)
def test_each_method_begins_with_a_valid_job_and_its_data(method: str, stages: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "My Job"
    done = init(method, folder)
    assert done.exit_code == 0, done.output
    assert f"cd {shlex.quote(str(folder))} && dovetail validate job.yaml --deep" in done.output
    checked = CliRunner().invoke(cli, ["validate", str(folder / "job.yaml")])
    assert checked.exit_code == 0, checked.output
    document = yaml.safe_load((folder / "job.yaml").read_text())
    assert document["metadata"]["name"] == "my-job"
    assert document["spec"]["stages"] == stages
    for sources in (document["spec"]["data"].get(name) for name in ("demonstrations", "preferences", "prompts")):
        for source in sources or ():
            lines = (folder / source["path"]).read_text().splitlines()
            assert len(lines) == 5
            assert {detect(json.loads(line), "line") for line in lines} <= {"PromptResponse", "ChosenRejected"}
    again = init(method, folder)
    assert again.exit_code == 2
    assert "job.yaml exists" in again.stderr


def test_the_game_of_init_is_an_environment(tmp_path: Path) -> None:
    assert init("agent", tmp_path).exit_code == 0
    spec = importlib.util.spec_from_file_location("game_of_init", tmp_path / "game.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    game = module.Game()
    assert "between 1 and 99" in game.reset(secret=24)
    assert game.calculate("(1 + 99) // 2") == "50"
    assert [game.guess(50), game.guess(24)] == ["lower", "right"]
    assert game.get_reward() == 0.5
    for wrong in ("__import__('os')", "9**9**9", "1 / 0", "(", "1(2)"):
        with pytest.raises(ValueError, match=r"^(an expression has numbers|cannot compute)"):
            game.calculate(wrong)
    with pytest.raises(ValueError, match="between 1 and 99"):
        game.guess(0)
    refused = init("agent", tmp_path / "other", "--data", tmp_path / "prompts.jsonl")
    assert refused.exit_code == 2
    assert "leave --data out" in refused.stderr


def test_the_reward_functions_reward_what_they_say(tmp_path: Path) -> None:
    assert init("grpo", tmp_path / "sums").exit_code == 0
    spec = importlib.util.spec_from_file_location("rewards_of_init", tmp_path / "sums/rewards.py")
    assert spec is not None
    assert spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    asked = json.loads((tmp_path / "sums/prompts.jsonl").read_text().splitlines()[0])
    assert rewards.correct([asked["prompt"]] * 2, ["It is 5.", "It is 6."], answer=[asked["answer"]] * 2) == [1.0, 0.0]
    shorter, longer = rewards.short([""] * 2, ["a", "a" * 100], answer=["5"] * 2)
    assert shorter > longer


def test_a_model_and_data_of_ones_own_are_named_in_the_manifest(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "Hello?", "chosen": "Hello!", "rejected": "No."}\n' * 40)
    done = init("ppo", tmp_path / "job", "--model", "Qwen/Qwen2.5-0.5B", "--data", data)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "job/prompts.jsonl").exists()
    spec = yaml.safe_load((tmp_path / "job/job.yaml").read_text())["spec"]
    assert spec["models"]["actor"]["source"] == {"huggingFace": "Qwen/Qwen2.5-0.5B"}
    assert "tokenizer" not in spec["models"]
    for name in ("demonstrations", "preferences", "prompts"):
        assert (tmp_path / "job" / spec["data"][name][0]["path"]).resolve() == data
    (tmp_path / "model").mkdir()
    assert init("sft", tmp_path / "other", "--model", tmp_path / "model").exit_code == 0
    source = yaml.safe_load((tmp_path / "other/job.yaml").read_text())["spec"]["models"]["actor"]["source"]
    assert source == {"path": str(tmp_path / "model")}


def test_the_rewards_fit_the_users_own_records_and_the_lengths_the_model(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "mine.jsonl"
    save_model_folder(model, context=256)
    rows = {"solution": '{"prompt": "2 + 2?", "solution": 4}', "none": '{"prompt": "Tell me a story.", "id": 3}'}
    for name, row in rows.items():
        data.write_text("\ufeff" + f"{row}\r\n\r\n" * 30, encoding="utf-8")
        assert init("grpo", tmp_path / name, "--model", model, "--data", data).exit_code == 0
        checked = CliRunner().invoke(cli, ["validate", str(tmp_path / name / "job.yaml"), "--deep"])
        assert checked.exit_code == 0, checked.output
    names = [
        yaml.safe_load((tmp_path / name / "job.yaml").read_text())["spec"]["models"]["reward"]["functions"][0][
            "function"
        ]
        for name in rows
    ]
    assert names == ["rewards:correct", "rewards:words"]


@pytest.mark.parametrize("method", ["sft", "dpo", "ppo", "grpo"])
def test_it_writes_what_the_command_line_means(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dovetail init METHOD` and `dovetail run --method METHOD` were two first jobs."""
    monkeypatch.chdir(tmp_path)
    model = save_model_folder(tmp_path / "model")
    Path("mine.jsonl").write_text('{"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "response": "4"}\n' * 40)
    assert init(method, tmp_path, "--model", model, "--data", "mine.jsonl").exit_code == 0
    written = yaml.safe_load(Path("job.yaml").read_text())["spec"]
    kinds = [kind for kind in ("demonstrations", "preferences", "prompts") if kind in written["data"]]
    options = [word for kind in kinds for word in (f"--{kind}", "mine.jsonl")]
    if method == "grpo":
        options += ["--reward", "rewards:correct", "--reward", "rewards:short"]
    done = CliRunner().invoke(cli, ["run", "--method", method, "--model", str(model), *options, "--print-only"])
    assert done.exit_code == 0, done.output
    meant = yaml.safe_load(done.stdout)["spec"]
    # What init adds: shares of the one file, and the weights of its two functions.
    shares = {name: written["data"].pop(name, None) for name in ("heldOut", "split")}
    assert shares["heldOut"] == 0.1, "the default"
    for function in written["models"].get("reward", {}).get("functions", ()):
        assert function.pop("needs") == "Sample"
        del function["weight"]
    assert written == meant


def test_a_new_folder_gets_the_lengths_of_the_records_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is named by its way from a folder that does not exist yet."""
    monkeypatch.chdir(tmp_path)
    model = save_model_folder(tmp_path / "model")
    Path("mine.jsonl").write_text(f'{{"prompt": "{"long " * 1200}", "answer": "4"}}\n' * 40)
    Path("there").mkdir()
    lengths = []
    for folder in ("there", "new", "new2/deep"):
        assert init("grpo", tmp_path / folder, "--model", model, "--data", "mine.jsonl").exit_code == 0
        lengths.append(yaml.safe_load((tmp_path / folder / "job.yaml").read_text())["spec"]["data"]["maxPromptTokens"])
    assert lengths[0] > 512, "the default"
    assert lengths == lengths[:1] * 3


def test_labelled_answers_make_a_job_of_kto(tmp_path: Path) -> None:
    """The job was refused when it ran: DPO learns from pairs, and SFT from no bad answer."""
    bad = LABELLED.replace("4", "5").replace("true", "false")
    (tmp_path / "kto.jsonl").write_text(f"{LABELLED}\n{bad}\n" * 30)
    done = init("dpo", tmp_path / "job", "--data", tmp_path / "kto.jsonl")
    assert done.exit_code == 0, done.output
    spec = yaml.safe_load((tmp_path / "job/job.yaml").read_text())["spec"]
    assert (spec["stages"], spec["dpo"]["loss"], next(iter(spec["data"]))) == (["dpo"], "KTO", "preferences")
    checked = CliRunner().invoke(cli, ["validate", str(tmp_path / "job/job.yaml"), "--deep"])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    ("method", "row", "sentence"),
    [
        (
            "sft",
            '{"prompt": "a"}',
            "mine.jsonl:1: field 'response' (or completion, output, answer, solution) is missing",
        ),
        ("ppo", '{"prompt": "a"}', "mine.jsonl:1: spec.data.preferences needs records with chosen and rejected"),
        ("grpo", '{"x": 1}', "mine.jsonl:1: cannot tell the format of a record with only 'x'"),
        ("ppo", LABELLED, "mine.jsonl:1: the record has one response and a label, which only KTO learns from"),
        ("grpo", LABELLED, "mine.jsonl:1: the record has one response and a label, which only KTO learns from"),
        ("grpo", "{", "mine.jsonl:1: not valid JSON"),
    ],
)
def test_data_that_a_method_cannot_read_is_refused_at_once(
    method: str, row: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text(row + "\n")
    done = init(method, tmp_path / "job", "--data", tmp_path / "mine.jsonl")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not (tmp_path / "job").exists()


def test_parquet_files_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it there was an ImportError of pyarrow."""
    (tmp_path / "mine.parquet").touch()
    monkeypatch.setattr("dovetail.protocol.process.extras.importlib.util.find_spec", lambda name: None)
    done = init("grpo", tmp_path / "job", "--data", tmp_path / "mine.parquet")
    assert done.exit_code == 2
    assert "dovetail init with Parquet files needs the extra 'coordinator': pip install" in done.stderr


def test_a_model_that_is_neither_a_folder_nor_a_hubs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = init("sft", tmp_path / "job", "--model", "gpt2")
    assert done.exit_code == 2
    assert "is no folder, and no model of a hub" in done.stderr
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    mistyped = init("sft", tmp_path / "job", "--model", "models/mine")
    assert "--model models/mine does not exist, but the folder models does" in mistyped.stderr
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("folder", "name"), [("My Job", "my-job"), ("2024_run", "job-2024-run"), ("___", "job"), ("a" * 90, "a" * 40)]
)
def test_the_jobs_name_is_made_of_the_folders(folder: str, name: str, tmp_path: Path) -> None:
    assert job_name(tmp_path / folder) == name


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """It leads to a file that does not exist yet, and is no file of the new job."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rewards.py").symlink_to(tmp_path / "elsewhere.py")
    result = init("grpo", tmp_path / "job")
    assert result.exit_code == 2
    assert "rewards.py exists; name another folder, or delete the file" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
