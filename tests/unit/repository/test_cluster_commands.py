"""Commands of the cluster tests on a machine that stands still for a while: its API server loses connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import cluster
from helpers.cluster import KubeCluster

# It fails as often as the file `failures` has letters, and tells the times that it was called.
PROGRAM = """#!/bin/bash
cd "${0%/*}"
echo called >> calls
left=$(cat failures)
[ -z "$left" ] && echo done && exit
echo -n "${left:1}" > failures
echo "Unable to connect to the server: $(cat error)" >&2
exit 1
"""
LOST = "http2: client connection lost"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """kubectl and helm, which fail once."""
    path = tmp_path / "program"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    (tmp_path / "failures").write_text("x")
    monkeypatch.setattr(cluster.binaries, "path_of", lambda name: path)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    return tmp_path


def calls(folder: Path) -> int:
    return (folder / "calls").read_text().count("called")


@pytest.mark.parametrize("word", ["get", "apply", "describe"])
def test_what_may_be_asked_twice_is_asked_again(program: Path, word: str) -> None:
    (program / "error").write_text(LOST)
    assert KubeCluster(program / "kubeconfig", None).kubectl(word, "pods") == "done\n"
    assert calls(program) == 2


@pytest.mark.parametrize("word", ["create", "delete", "drain"])
def test_what_may_have_been_done_is_not(program: Path, word: str) -> None:
    (program / "error").write_text(LOST)
    with pytest.raises(AssertionError, match=f"kubectl {word} pods: .*{LOST}"):
        KubeCluster(program / "kubeconfig", None).kubectl(word, "pods")
    assert calls(program) == 1


def test_what_did_not_arrive_is_sent_again(program: Path) -> None:
    (program / "error").write_text(f"net/http: TLS handshake timeout - error from a previous attempt: {LOST}")
    theirs = KubeCluster(program / "kubeconfig", None)
    assert theirs.helm("upgrade", "--install", "one", "chart") == "done\n"
    (program / "failures").write_text("x")
    assert theirs.kubectl("create", "-f", "-") == "done\n"
    assert calls(program) == 4


def test_an_answer_is_an_answer(program: Path) -> None:
    (program / "error").write_text("the object is not valid")
    with pytest.raises(AssertionError, match="not valid"):
        KubeCluster(program / "kubeconfig", None).kubectl("get", "pods")
    assert calls(program) == 1
