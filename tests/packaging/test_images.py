"""Each image has what its processes import, and asks for nothing else."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from helpers.image_modules import FOLDERS, IMAGES, ROOT, third_party

pytestmark = pytest.mark.slow

UV = Path(sys.executable).with_name("uv")
# The search for schedules does without the first two (the extra `schedules`), and an image has no debugger. Users add
# the clients of the trackers that they name to an image of their own.
OPTIONAL = {"numba", "ortools", "debugpy", "wandb", "mlflow", "trackio", "opentelemetry"}


def run(*words, env=None, check=True):
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **(env or {})}
    done = subprocess.run(list(map(str, words)), env=environ, capture_output=True, text=True, timeout=1200, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module", params=IMAGES, ids=[image.extra for image in IMAGES])
def image(request):
    return request.param


@pytest.fixture(scope="module")
def python(image, tmp_path_factory):
    """Of an environment with the image's requirements alone; packages are links into uv's cache, else downloaded."""
    folder = tmp_path_factory.mktemp(image.extra) / "venv"
    uv_env = {key: value for key, value in os.environ.items() if key.startswith(("UV_", "SSL_", "PIP_"))}
    run(UV, "venv", "--quiet", "--python", sys.executable, folder, env=uv_env)
    sync = (UV, "pip", "sync", "--quiet", "--require-hashes", "--python", folder / "bin/python", image.requirements)
    if run(*sync, "--offline", env=uv_env, check=False).returncode:
        run(*sync, env=uv_env)
    return folder / "bin/python"


def test_all_that_its_processes_import_is_there(image, python):
    wanted = sorted(third_party(image) - OPTIONAL)
    code = f"import importlib.util; print([n for n in {wanted} if importlib.util.find_spec(n) is None])"
    assert run(python, "-c", code).stdout.strip() == "[]"


def test_its_processes_start(image, python):
    """Without an environment they say which variable is missing, or which cluster; all imports are behind them then."""
    for module in image.processes:
        done = run(
            *(python, "-P", "-m", module),
            env={"PYTHONPATH": ":".join(map(str, FOLDERS)), "KUBECONFIG": "/no/such/file", "HOME": "/no/such/home"},
            check=False,
        )
        assert done.returncode in (1, 2, 3), (module, done.stderr)  # 3: uvicorn, which could not start
        assert "ModuleNotFoundError" not in done.stderr, (module, done.stderr)
        assert "ImportError" not in done.stderr, (module, done.stderr)


CHAT = """
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from dovetail.coordinator.data.text.tokenizer import with_template_options
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if short %}.{% endif %}{% endfor %}"
tokenizer = with_template_options(tokenizer, {"short": True})
print(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False))
"""


def test_the_coordinator_renders_chat_templates(image, python):
    """The library that renders them is optional for transformers."""
    if image.extra == "operator":
        done = run(python, "-P", "-c", CHAT, env={"PYTHONPATH": ":".join(map(str, FOLDERS))})
        assert done.stdout.strip() == "user: hi."


SENTENCES = """
import json, pathlib, sys, sentencepiece
from dovetail.coordinator.data.text.tokenizer import load
folder = pathlib.Path(sys.argv[1])
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["What is two plus three? The answer is five."] * 50),
    model_prefix=str(folder / "tokenizer"),
    vocab_size=300, model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
)
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
print(len(load(folder, "f")("five")["input_ids"]) > 0)
"""


def test_the_coordinator_reads_a_tokenizer_that_is_a_sentencepiece_file(image, python, tmp_path):
    """The library that reads it is optional for transformers."""
    if image.extra == "operator":
        done = run(python, "-P", "-c", SENTENCES, tmp_path, env={"PYTHONPATH": ":".join(map(str, FOLDERS))})
        assert done.stdout.strip() == "True"


def test_its_extra_asks_for_nothing_that_its_processes_do_not_import(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    by_distribution: dict[str, set[str]] = {}
    for name, distributions in packages_distributions().items():
        for distribution in distributions:
            by_distribution.setdefault(_normal(distribution), set()).add(name)
    imported = third_party(image)
    asked = set(_asked(project, image.extra))
    assert {name for name in asked if not by_distribution[name] & imported} - {"sentencepiece"} == set()


def _asked(project, extra):
    for text in project["optional-dependencies"][extra]:
        if inner := re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", text):
            yield from _asked(project, inner[1])
        else:
            yield _normal(text)


def _normal(text):
    return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-").replace(".", "-")
