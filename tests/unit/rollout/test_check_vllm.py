"""`make check-vllm`, on sources that are made up and on the vLLM that is installed; the registry is not asked."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HACK = Path(__file__).parents[3] / "hack"


@pytest.fixture(scope="module")
def vllm():
    sys.path.insert(0, str(HACK))
    try:
        spec = importlib.util.spec_from_file_location("check_vllm", HACK / "check_vllm.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HACK))
    return module


@pytest.mark.slow
def test_the_installed_vllm_has_all_that_the_plug_ins_use(vllm):
    found = vllm.surface(vllm.installed)
    assert [name for name, what in found.items() if what == "missing"] == []
    assert found["vllm.entrypoints.launchers.api_server.entry:run_server"] == "(args, uvicorn_kwargs)"
    assert found["--weight-transfer-config"] == "there"
    base = "vllm.distributed.weight_transfer.base:WeightTransferEngine"
    assert found[f"{base}.receive_weights"] == "(self, update_info)"


@pytest.mark.slow
def test_what_another_vllm_lacks_or_has_changed_is_named(vllm):
    base = "vllm.distributed.weight_transfer.base"
    logger = "vllm.logger"

    def other(module):
        text = vllm.installed(module)
        if module == base:
            return text.replace("def receive_weights(self, update_info", "def receive_weights(self, update_info, more")
        if module == logger:
            return text.replace("def configure_logging_from_args", "def configure")
        return text

    here, there = vllm.surface(vllm.installed), vllm.surface(other)
    assert {name: there[name] for name in here if here[name] != there[name]} == {
        f"{base}:WeightTransferEngine.receive_weights": "(self, update_info, more)",
        f"{logger}:configure_logging_from_args": "missing",
    }


@pytest.mark.slow
def test_a_route_that_another_vllm_lacks_is_named(vllm):
    """As in vLLM 0.31, which has all names and parameters."""

    def other(module):
        return vllm.installed(module).replace("/inference/v1/generate", "/generate")

    here, there = vllm.surface(vllm.installed), vllm.surface(other)
    assert {name for name in here if here[name] != there[name]} == {"/inference/v1/generate"}


def test_both_ends_are_asked_for(vllm, monkeypatch):
    asked = []

    def run(command, input, **_):
        asked.append((command[-1], input))
        return subprocess.CompletedProcess(command, 0, f"vllm=={'0.31.0' if command[-1] == 'lowest' else '0.33.2'}\n")

    monkeypatch.setattr(vllm.subprocess, "run", run)
    assert vllm.ends() == ["0.31.0", "0.33.2"]
    assert asked == [("lowest", f"vllm{vllm.supported()}"), ("highest", f"vllm{vllm.supported()}")]
