"""Documents name files, pages, fields and commands that are there, and the site is built of them."""

import ast
import dataclasses
import html.parser
import json
import lzma
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

import click
import jsonschema
import markdown
import pytest
import yaml
from markdown_it import MarkdownIt
from mkdocs.utils.yaml import yaml_load
from pydantic import TypeAdapter, ValidationError

from dovetail.cli.main import cli
from dovetail.coordinator.reporting import health
from dovetail.coordinator.reporting.telemetry import CoordinatorMetrics
from dovetail.coordinator.reporting.wait_chain import STALLED
from dovetail.coordinator.rewards.values import checked
from dovetail.manifest.checks.validation import load_manifest, parse_manifest
from dovetail.manifest.status import RLHFJobStatus
from dovetail.manifest.types import RLHFJobSpec
from dovetail.operator.reconcile import reasons
from dovetail.planner.make_plan import make_plan
from dovetail.trainer.rank.metrics import TrainerMetrics
from helpers.patience import PATIENCE

ROOT = Path(__file__).parents[3]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
SITE = yaml_load(ROOT.joinpath("mkdocs.yml").open("rb"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Language ("" if none) and text of each block of code, fenced or indented."""
    tokens = MarkdownIt().parse(page.read_text())
    return [(token.info.strip(), token.content) for token in tokens if token.type in ("fence", "code_block")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        outside = page in DOCS and not file.is_relative_to(ROOT / "docs")
        if outside or not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == [], "a link of the site must lead to something in docs/ that is there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_text_is_indented_so_far_that_it_is_shown_as_code(page):
    assert [text for language, text in code_blocks(page) if not language and re.search(r"\]\([^)\s]+\)", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_row_stands_outside_of_a_table(page):
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    assert [token.content for token in tokens if token.type == "inline" and token.content.startswith("|")] == []


def test_the_code_names_pages_and_sections_that_are_there():
    missing, found = [], 0
    for folder in ("src", "operator", "trainer_image", "rollout_image"):
        for file in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s*\n\s*(# )?", " ", file.read_text())
            for name, section in re.findall(r'docs/([\w/-]+\.md)(?:, \\?"([^"\\]+)\\?")?', text):
                found += 1
                page = ROOT / "docs" / name
                if not page.is_file() or (section and f"# {section}\n" not in page.read_text()):
                    missing.append((str(file.relative_to(ROOT)), name, section))
    assert missing == []
    assert found > 15


# What people type into a search box: here, in issues and chats of trainers.
SEARCHES = """csv; json list; parquet; alpaca; sharegpt; system prompt; chat template; thinking; gated model;
HF_TOKEN; offline; validation split; vision; packing; llm judge; reward model own; custom loss; training loop; agent
tools; lora; qlora; 4-bit; 8-bit optimizer; learning rate schedule; gradient accumulation; early stopping;
distillation; single GPU; multi node; slurm; deepspeed; megatron; amd rocm; macos; flash attention; bf16; fp8; long
context; out of memory; docker; cost; resume; seed; tensorboard; wandb; mlflow; nan loss; reward hacking; notebook;
checkpoint hugging face; merge lora; adapter peft; openai api; gguf; ollama; push hub; lm-eval; benchmarks; batch
inference"""


@pytest.mark.parametrize("query", [each.strip() for each in SEARCHES.replace("\n", " ").split(";")])
def test_a_search_for_a_how_to_finds_an_answer(query: str) -> None:
    """One answer of the page has all words of the query, as a search finds them, and says yes, how, or no."""
    answers = re.findall(r"^- \*\*.+?(?=^- \*\*|^## |\Z)", (ROOT / "docs/questions.md").read_text(), re.M | re.S)
    stems = [re.sub(r"(ion|ing|es|s|e|ed)$", "", word) if len(word) > 4 else word for word in query.lower().split()]
    found = [each for each in answers if all(re.search(rf"\b{re.escape(stem)}", each.lower()) for stem in stems)]
    assert found, "docs/questions.md has no answer"
    assert any(re.search(r"`|\]\(|\bno\b|\bnot\b", each, re.I) for each in found)


def test_contributing_names_files_that_are_there():
    named = re.findall(
        r"`((?:src|tests|docs|operator|trainer_image|rollout_image|helm)/[^`\s]+)`", PAGES[1].read_text()
    )
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


# ------------------------------------------------------------------ the site


def pages_of(entry) -> Iterator[str]:
    for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages_of(value)
    if isinstance(entry, str):
        yield entry


def test_every_page_has_its_place_in_mkdocs_yml():
    listed = list(pages_of(SITE["nav"]))
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in DOCS]


def _inline_html(text: str) -> Iterator[str]:
    for token in MarkdownIt().enable("table").parse(text):
        yield from (child.content for child in token.children or () if child.type == "html_inline")


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_the_site_shows_the_lists_and_blocks_that_github_shows(page):
    """MkDocs' Markdown wants an empty line before a list, and four spaces before what is inside an item."""
    text = page.read_text()
    shown = markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
    meant = MarkdownIt().enable("table").render(text)
    assert re.findall(r"<[a-z]+>", "".join(_inline_html(text))) == [], "a browser takes <name> for a tag"
    for tag in ("li", "table", "pre"):
        assert len(re.findall(f"<{tag}[ >]", shown)) == len(re.findall(f"<{tag}[ >]", meant)), f"<{tag}>"


class Loaded(html.parser.HTMLParser):
    """What a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical" and given.get("href"):
            self.found.append(given["href"])


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    done = subprocess.run([*command, "--site-dir", tmp_path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {page.relative_to(tmp_path).with_suffix(".md") for page in pages} >= {
        page.relative_to(ROOT / "docs") for page in DOCS
    }
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert loaded.found
        assert [url for url in loaded.found if re.match(r"(https?:)?//", url)] == [], page.name
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet.name


# ------------------------------------------------------------------ manifests and commands


def manifests() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        # Each process that runs tests comes here before the first one.
        blocks = code_blocks(page) if "kind: RLHFJob" in page.read_text() else []
        for language, text in blocks:
            if language == "yaml" and "kind: RLHFJob" in text:
                yield name_of(page), text


MANIFESTS = list(manifests())


def test_there_are_manifests_to_check():
    assert len(MANIFESTS) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), MANIFESTS, ids=[page for page, _ in MANIFESTS])
def test_manifests_pass_the_types_and_the_rules_and_are_planned(page, text):
    assert parse_manifest(text).kind == "RLHFJob"
    assert make_plan(load_manifest(text).spec).world_size > 0


def python_of(page: str, beginning: str) -> str:
    """The block of Python of a page that begins with `beginning`."""
    (found,) = (
        text for language, text in code_blocks(ROOT / page) if language == "python" and text.startswith(beginning)
    )
    return found


def test_rewards_of_steps_are_given_as_the_page_says():
    found: dict = {"judge": lambda line: float("so" in line), "correct": lambda response: float(response.endswith("4"))}
    exec(python_of("docs/custom.md", "def lines("), found)
    (one, none) = found["lines"](["2 + 2?"] * 2, ["Two and two,\nso 4", ""])
    assert one == {"reward": 1.0, "steps": [[13, 0.0], [17, 1.0]]}
    values = checked([one, none], ["Two and two,\nso 4", ""])
    assert values.rewards == [1.0, 0.0]


def test_a_reward_of_trl_is_called_as_the_page_says(monkeypatch):
    theirs = types.ModuleType("theirs")
    theirs.accuracy_reward = lambda prompts, completions, solution, **_: [  # type: ignore[attr-defined]
        float(text == right) for text, right in zip(completions, solution, strict=True)
    ]
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    found: dict = {}
    exec(python_of("docs/coming-from.md", "from theirs import"), found)
    assert found["score"](["2 + 2?"] * 2, ["4", "5"], solution=["4", "4"]) == [1.0, 0.0]


@pytest.mark.slow
def test_the_job_from_trl_trains_as_trl_does():
    """The optimizer that TRL's trainers inherit from Transformers, with what the page's script sets."""
    from transformers import TrainingArguments

    given: dict = {}
    trainer = types.SimpleNamespace(train=lambda: None)
    names = {"accuracy_reward": None, "dataset": None, "GRPOConfig": lambda **args: given.update(args)}
    exec(python_of("docs/coming-from.md", "GRPOTrainer("), names | {"GRPOTrainer": lambda **_: trainer})
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)} | given
    (text,) = (
        text
        for _, text in code_blocks(ROOT / "docs/coming-from.md")
        if text.startswith("apiVersion") and "rewards:score" in text
    )
    ppo = parse_manifest(text).spec.ppo
    ours = ppo.actor_optimizer
    assert (ours.learning_rate, ours.beta1, ours.beta2, ours.eps, ours.weight_decay, ours.max_grad_norm) == tuple(
        theirs[name]
        for name in ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
    )
    assert (ours.schedule.lower(), ours.warmup_fraction) == (str(theirs["lr_scheduler_type"]), theirs["warmup_steps"])
    assert (ppo.kl.coef, ppo.samples_per_prompt) == (theirs["beta"], theirs["num_generations"])


def test_reward_functions_of_the_how_to_pages_work():
    found: dict = {}
    for name in ("grpo.md", "reward.md"):
        for language, text in code_blocks(ROOT / "docs/how-to" / name):
            if language == "python":
                exec(text, found)
    texts = ["I think. Answer: 5", "Answer: 5, no, Answer: 6", "Hello, I do not know"]
    prompts = ["2 + 3?"] * 3
    assert found["correct"](prompts, texts, answer=["5"] * 3) == [1.0, 0.0, 0.0]
    assert found["polite"](prompts, texts, answer=["5"] * 3) == [0.0, 0.0, 1.0]
    assert found["short"](prompts, ["", "ab"]) == [0.0, -0.002]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_parts_of_manifests_have_fields_that_exist(page):
    """A block that begins with fields of spec. What it leaves out is not looked at."""
    for language, text in code_blocks(page):
        if language not in ("yaml", "") or "kind:" in text.split("spec:")[0]:
            continue
        try:
            part = yaml.safe_load(text)
        except yaml.YAMLError:
            assert language == "", f"no YAML: {text}"
            continue
        part = part.get("spec", part) if isinstance(part, dict) else {}
        if not isinstance(part, dict) or not part or not set(part) <= set(SPEC):
            continue
        for name, value in part.items():
            try:
                TypeAdapter(SPEC[name]).validate_python(value)
            except ValidationError as error:
                wrong = [each for each in error.errors() if each["type"] != "missing"]
                assert wrong == [], text


SPEC = {field.alias or name: field.annotation for name, field in RLHFJobSpec.model_fields.items()}


def command_lines(text: str) -> Iterator[str]:
    """Of a block of shell lines, those that call `dovetail`, up to a pipe, a redirection or a comment."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\|\||\||;|>)\s", line):
            found = re.fullmatch(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*((?:\.venv/bin/)?dovetail\s+[a-z-].*)", part)
            if found:
                yield found[1]


def parse(line: str) -> None:
    """Read a command line as `dovetail` would, and run nothing. Raises click.UsageError."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return  # of the whole program: --help, --version
        if words[0] not in command.commands:
            raise click.UsageError(f"there is no command {words[0]}")
        command = command.commands[words.pop(0)]
    with command.make_context(command.name, words):
        pass


@pytest.mark.parametrize("page", [*PAGES, ROOT / "helm/dovetail/README.md"], ids=name_of)
def test_commands_can_be_parsed(page, monkeypatch):
    # The files of an example need not be there.
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: self.coerce_path_result(value))
    for language, text in code_blocks(page):
        if language not in ("", "sh", "bash", "text", "console"):
            continue
        for line in command_lines(text):
            if "OPTIONS" in line:
                continue  # a line of usage
            try:
                parse(line)
            except click.ClickException as error:
                pytest.fail(f"{line}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_exist(page):
    named = re.findall(r"`dovetail ([a-z]+)[^`]*`", page.read_text())
    assert [name for name in named if name not in cli.commands] == []


def test_commands_of_the_table_are_complete(monkeypatch):
    """One lacked an option that it needs."""
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: self.coerce_path_result(value))
    rows = re.findall(r"^\| `(dovetail [^`]+)` \|", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    whole = [row for row in rows if "..." not in row]
    assert len(whole) > 10
    for row in whole:
        parse(re.sub(r"(\w+)(\\?\|\w+)+", r"\1", row))  # of several words, the first


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [
        word
        for _, text in code_blocks(page)
        for words in re.findall(r"^(?:\w+=\S+ )?make ((?:-s )?[a-z][a-z0-9 -]*)", text, re.MULTILINE)
        for word in words.replace("-s ", "").split()
    ]
    assert [name for name in named if name not in targets] == []


def test_workflows_run_what_contributors_run():
    """Targets that exist, without root where a fork runs them, and at night also what `make test` leaves out."""
    workflows = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name: {
            target
            for job in yaml.safe_load(text)["jobs"].values()
            for step in job["steps"]
            for words in re.findall(r"\bmake ([a-z][a-z -]*)", step.get("run", ""))
            for target in words.split()
        }
        for name, text in workflows.items()
    }
    assert named == {"ci": {"lint", "test-fast", "same-bits"}, "nightly": {"test-packages", "test-nightly"}}
    assert targets >= set().union(*named.values())
    assert "sudo" not in workflows["ci"]


# ------------------------------------------------------------------ what others' commands are given

CHART = ROOT / "helm/dovetail"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def shell_lines(beginning: str) -> list[list[str]]:
    """The words of all lines of shell blocks that begin so, up to a pipe or a redirection."""
    return [
        list(takewhile(lambda word: word not in ("|", "<", ">", "&", "&&"), shlex.split(line, comments=True)))
        for page in PAGES
        for language, text in code_blocks(page)
        if language in ("", "sh", "bash", "console")
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip().startswith(f"{beginning} ")
    ]


def option(words: Sequence[str], name: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words[:-1]) if word == name]


def test_what_kubectl_is_given_is_there_and_valid():
    lines = shell_lines("kubectl")
    assert len(lines) > 25
    job = yaml.safe_load((ROOT / "examples/quickstart-cluster.yaml").read_text())
    states = {field.alias or name for name, field in RLHFJobStatus.model_fields.items()}
    for words in lines:
        for file in [*option(words, "-f"), *option(words, "--from-file")]:
            assert (ROOT / file).is_file(), words
        for patch in option(words, "--patch"):
            changed = json.loads(patch)
            assert set(changed) == {"spec"}
            parse_manifest(yaml.safe_dump({**job, "spec": {**job["spec"], **changed["spec"]}}))
        for path in option(words, "-o"):
            assert set(re.findall(r"\{\.status\.(\w+)", path)) <= states, words


def test_what_helm_is_given_are_values_of_the_chart():
    schema = json.loads((CHART / "values.schema.json").read_text())
    blocks = [
        yaml.safe_load(text)
        for page in PAGES
        for language, text in code_blocks(page)
        if language in ("", "yaml") and re.match(rf"(?:#.*\n)?(?:{'|'.join(VALUES)}):", text)
    ]
    own = [block for block in blocks if set(block) <= set(VALUES)]
    assert len(own) >= 4
    for block in own:
        jsonschema.validate(merged(VALUES, block), schema)
    charts = [words for words in shell_lines("helm") if "helm/dovetail" in words]
    assert len(charts) >= 3
    for words in charts:
        for pair in option(words, "--set"):
            name, value = pair.split("=", 1)
            given = yaml.safe_load(value.replace("{", "[").replace("}", "]"))
            for part in reversed(name.split(".")):
                given = {part: given}
            assert set(given) <= set(VALUES), words
            jsonschema.validate(merged(VALUES, given), schema)


def merged(below: dict, above: dict) -> dict:
    """Values as helm puts them together."""
    both = {
        name: merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


def test_what_curl_asks_for_is_in_the_api():
    paths = json.loads((ROOT / "docs/openapi.json").read_text())["paths"]
    known = [re.sub(r"\{\w+\}", "[^/]+", path) for path in paths]
    asked = [
        word for words in shell_lines("curl") for word in words if re.match(r"(?:http://)?(?:localhost|127)", word)
    ]
    ours = [re.sub(r"^(?:http://)?[^/]+", "", url) for url in asked if "/api/" in url]
    assert ours
    assert [path for path in ours if not any(re.fullmatch(one, path) for one in known)] == []


# ------------------------------------------------------------------ reasons and metrics


def headings(page: Path) -> set[str]:
    return {
        name.strip()
        for heading in re.findall(r"^### (.+)$", page.read_text(), re.MULTILINE)
        for name in heading.split(",")
    }


def test_every_reason_of_a_condition_is_explained():
    told = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    well = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/conditions.md").read_text(), re.MULTILINE))
    ill = headings(ROOT / "docs/by-condition.md")
    verdicts = {*health.REASONS, STALLED}
    assert told | verdicts <= well | ill
    assert ill <= told | verdicts, "a section is of no reason"


@pytest.mark.slow
def test_every_event_of_a_run_is_explained():
    called = {
        (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""), node.args[0].value)
        for file in (ROOT / "src/dovetail/coordinator").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    }
    texts = {str(text) for name, text in called if name in ("log", "_log")}
    logged = {text for text in texts if re.fullmatch(r"[a-z_]+\.[a-z_]+", text)}
    page = (ROOT / "docs/conditions.md").read_text().partition("## Events of a run")[2]
    told = set(re.findall(r"`(\w+\.\w+)`", "\n".join(row.split("|")[1] for row in page.splitlines() if "|" in row)))
    assert len(logged) > 30
    assert told == logged


def test_every_metric_of_prometheus_is_explained():
    from prometheus_client import CollectorRegistry

    page = (ROOT / "docs/metrics.md").read_text()
    for make in (CoordinatorMetrics, TrainerMetrics):
        registry = CollectorRegistry()
        make(registry)
        missing = [family.name for family in registry.collect() if f"`{family.name}" not in page]
        assert missing == []


def test_every_metric_of_a_recorded_run_is_explained():
    recorded = json.loads(lzma.decompress((ROOT / "src/dovetail/tools/run_page/demo.json.xz").read_bytes()))
    rows = [json.loads(row) for run in recorded["runs"] for row in run["files"]["history.jsonl"].splitlines()]
    names = {name.removesuffix("_ci95") for row in rows for name in row["metrics"] if row["stage"] != "evaluation"}
    assert len(names) > 40
    page = (ROOT / "docs/metrics.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page and f"`{name} " not in page] == []
