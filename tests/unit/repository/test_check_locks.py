"""Two packages that install the same file break each other. What needs the registry is `make check-locks`; here are its
parts, the packages that are installed, and the one pair that collided once."""

import csv
import importlib.util
import re
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath

import httpx
import pytest

ROOT = Path(__file__).parents[3]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.fixture(scope="module")
def locks():
    spec = importlib.util.spec_from_file_location("check_locks", ROOT / "hack" / "check_locks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_locks"] = module
    spec.loader.exec_module(module)
    return module


def wheel(folder, name, files):
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
    return path


@pytest.fixture
def two_wheels(tmp_path):
    big = {f"a/{k}.py": "x" * 4096 for k in range(64)}
    return [
        wheel(tmp_path, "a-1-py3-none-any.whl", {**big, "shared/__init__.py": "", "shared/core.py": "old"}),
        wheel(tmp_path, "b-2-py3-none-any.whl", {"shared/__init__.py": "", "b-2.data/purelib/shared/core.py": "new"}),
    ]


def test_a_file_of_two_wheels_is_named(locks, two_wheels):
    found = locks.collisions({path.name[:1]: locks.contents(path) for path in two_wheels})
    assert locks.sentences(found) == ["a and b both install shared/core.py"]


def test_only_a_wheels_directory_is_downloaded(locks, two_wheels, monkeypatch):
    monkeypatch.setattr(locks, "TAIL", 512)
    content, sent = two_wheels[0].read_bytes(), []

    class Pieces(BaseHTTPRequestHandler):
        def do_GET(self):
            start, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
            piece = content[start : end + 1]
            sent.append(len(piece))
            self.send_response(206 if self.path == "/pieces" else 200)
            self.send_header("Content-Length", str(len(piece)))
            self.end_headers()
            self.wfile.write(piece)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pieces)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with httpx.Client(trust_env=False) as client:
            assert locks.contents(locks.RemoteFile(client, f"{url}/pieces", len(content))) == locks.contents(
                two_wheels[0]
            )
            assert sum(sent) < len(content) / 10
            with pytest.raises(OSError, match="the registry answers 200 to a request for a piece of it"):
                locks.RemoteFile(client, f"{url}/whole", len(content))
    finally:
        server.shutdown()
        server.server_close()


def test_the_wheel_of_this_platform_is_looked_at(locks):
    tags = {tag: rank for rank, tag in enumerate(locks.sys_tags())}
    best = next(iter(tags))
    urls = [{"url": f"https://x/n-1-{t}.whl"} for t in ("py3-none-any", "cp27-cp27m-win32", str(best))]
    assert locks.chosen(urls, tags) is urls[2]
    assert locks.chosen(urls[1:2], tags) is None


@pytest.mark.slow
def test_installed_packages_do_not_overwrite_each_other(locks):
    """Of all packages of requirements/cpu.txt, by what the records of their wheels say."""
    packages = {}
    for distribution in distributions():
        rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
        packages[distribution.name] = {PurePosixPath(row[0]): tuple(row[1:]) for row in rows if row}
    assert len(packages) > 100
    ours = {name: files for name, files in packages.items() if name != "dovetail-rlhf"}
    # Programs are written anew where they are installed.
    found = locks.collisions({n: {p: s for p, s in f.items() if ".." not in p.parts} for n, f in ours.items()})
    assert locks.sentences(found) == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_cuda_python_comes_without_the_files_of_cuda_bindings(lock):
    """From 12.8 on cuda-python is empty; in earlier ones are the files that cuda-bindings has, too."""
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    python, bindings = pinned.get("cuda-python"), pinned.get("cuda-bindings")
    if python is not None and bindings is not None:
        assert python.split(".")[0] == bindings.split(".")[0], f"cuda-python {python}, cuda-bindings {bindings}"


def test_everything_that_is_installed_has_a_hash():
    """Also what installs and what builds: uv, and hatchling with what it needs."""
    files = [ROOT / "Makefile", *ROOT.glob("*/Dockerfile")]
    commands = [
        line.strip()
        for file in files
        for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if re.search(r"\bpip\b.* (install|sync) ", line) and not line.startswith("#")
    ]
    assert len(commands) >= 6
    # The extra index of a Dockerfile is for wheels of the user's own.
    checked = ("--require-hashes", "--build-constraint requirements/build.txt", "--no-index", "--no-build-isolation")
    assert [command for command in commands if not any(option in command for option in checked)] == []
    for name in ("build", "uv"):
        pins = re.findall(r"^[\w.-]+==.*\n(\s*--hash)?", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)
        assert pins
        assert all(pins)
    version = re.search(r"^UV_VERSION := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert f"\nuv=={version} " in (ROOT / "requirements/uv.txt").read_text()
