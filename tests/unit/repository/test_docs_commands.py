"""Every command of the documents is run: here if it starts no servers, else by the test that is named for it."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt

from dovetail.cli.main import cli
from dovetail.coordinator.reporting.sample_files import BEFORE_SFT, SampleFiles, evaluation_files, read_rows
from helpers.demo_runs import demo_runs
from helpers.model_folder import save_model_folder

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Commands that start processes, ask a hub or a cluster, look at this machine, or need the store of a whole run. A test
# runs each of them.
ELSEWHERE = {
    r"run (?!.*--print-only).*--method": ("tests/e2e/test_new_user.py", '"--method"'),
    r"run .*--resume": ("tests/e2e/test_launcher_run.py", '"--resume"'),
    r"run (?!.*--print-only)": ("tests/e2e/test_launcher_run.py", '"run"'),
    "chat .*--compare": ("tests/unit/local/test_chat_served.py", "--compare"),
    "chat": ("tests/unit/local/test_chat_served.py", '"chat"'),
    "samples .*--session": ("tests/unit/coordinator/test_sample_texts.py", '"--session"'),
    "serve": ("tests/e2e/test_served_result.py", '"serve"'),
    "export": ("tests/unit/trainer/test_checkpoint_export.py", '"export"'),
    "push": ("tests/unit/data/test_hub_push.py", '"push"'),
    "ui": ("tests/unit/coordinator/test_run_page.py", '"ui"'),
    "profile": ("tests/e2e/test_new_user.py", '"profile"'),
    "debug replay .*--session": ("tests/e2e/test_agent_job.py", '"--session"'),
    "debug replay": ("tests/e2e/test_job.py", '"debug", "replay"'),
    "debug diff": ("tests/unit/local/test_debug_diff.py", '"debug", "diff"'),
    "audit": ("tests/unit/coordinator/test_audit.py", '"audit"'),
    "doctor": ("tests/unit/local/test_doctor.py", '"doctor"'),
    "plan .*--class": ("tests/unit/local/test_cli_main.py", '"--class"'),
    "plan .*--cluster": ("tests/unit/planner/test_placement_cli.py", '"--cluster"'),
}


def command_lines() -> Iterator[str]:
    """The calls of `dovetail` in blocks of shell lines, each once, up to a pipe, a redirection or a comment."""
    for page in PAGES:
        for token in MarkdownIt().parse(page.read_text()):
            info = token.info.strip()
            if token.type not in ("fence", "code_block") or info not in ("", "sh", "bash", "text", "console"):
                continue
            for line in token.content.replace("\\\n", " ").splitlines():
                for part in re.split(r"\s(?:&&|\|\||\||;|>|#)\s", line):
                    found = re.fullmatch(r"\s*(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?dovetail\s+([a-z-].*?)\s*", part)
                    if found and "OPTIONS" not in found[1]:
                        yield found[1]


COMMANDS = sorted(set(command_lines()))


def elsewhere(command: str) -> tuple[str, str] | None:
    return next((test for pattern, test in ELSEWHERE.items() if re.match(rf"{pattern}\b", command)), None)


HERE = [command for command in COMMANDS if elsewhere(command) is None]


def test_commands_are_found() -> None:
    assert len(HERE) > 20
    assert len(COMMANDS) > 45


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents assume: a job of one's own, its data, a model, and finished runs."""
    folder = tmp_path_factory.mktemp("made")
    model = save_model_folder(folder / "model")
    done = CliRunner().invoke(cli, ["init", "grpo", str(folder / "job"), "--model", str(model)])
    assert done.exit_code == 0, done.output
    whole = demo_runs(folder / "recorded")
    samples = SampleFiles(whole, 10**9)
    samples.write_evaluation(BEFORE_SFT, read_rows(evaluation_files(whole)[0]))
    for name in ("quickstart", "demo", "polite", "sums", "first", "agent"):
        shutil.copytree(whole, folder / "job/runs" / name)
    # Two nodes are enough: a search for the lowest price takes ten times as long with all of the example's.
    gpus = yaml.safe_load((ROOT / "examples/inventories/a100-v100-a10.yaml").read_text())["pools"]
    (folder / "job/gpus.yaml").write_text(yaml.safe_dump({"pools": [gpus[0], gpus[2] | {"nodes": 1}]}))
    shutil.copytree(ROOT / "examples", folder / "job/examples")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shutil.copytree(made / "job", tmp_path / "here"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE)
def test_it_runs(command: str, here: Path) -> None:
    # A model of a hub is out of reach here. A folder stands in.
    local = re.sub(r"Qwen/Qwen(2\.5-0\.5B(-Instruct)?|3-8B)", str(here / "model"), command)
    if "gpus.yaml" in command:
        local = local.replace("job.yaml", "examples/quickstart-cluster.yaml")
    if command.startswith("schedule"):
        local += " --seconds 1"
    done = CliRunner().invoke(cli, shlex.split(local))
    assert done.exit_code == 0, done.output
    assert done.output.strip() or "--grep" in command, "a search may find nothing"


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_the_others_are_run_where_the_table_says(pattern: str) -> None:
    place, text = ELSEWHERE[pattern]
    files = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("test_*.py"))
    assert any(text in file.read_text() for file in files)
    assert [command for command in COMMANDS if re.match(rf"{pattern}\b", command)], "no document has it any more"
