"""The programs, built once from the Go modules in `go/` into the cache; a changed module is built anew."""

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from devcluster.settings import SOURCES, ClusterError, cache_root, digest, locked

KUBERNETES = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet"]
OURS = ["gpu-device-plugin", "volume-provisioner"]
# What is built at once: its programs. The Kubernetes ones are links to one binary.
MODULES = {
    "kubernetes": KUBERNETES + OURS,
    "containerd": ["containerd", "containerd-shim-runc-v2", "ctr"],
    "coredns": ["coredns"],
    "jobset": ["jobset"],
    "helm": ["helm"],
    "kueue": ["kueue"],
    "kwok": ["kwok"],
    "kubeconform": ["kubeconform"],
    "helm-unittest": ["helm-unittest"],
    "promtool": ["promtool"],
    "versitygw": ["versitygw"],  # an S3 server
    "registry": ["crane"],
    "kube-router": ["kube-router"],  # its NetworkPolicies alone
}
# These are packages of the Go module `go/cluster`, whose programs share what is compiled: all have one client-go. The
# others are modules of their own.
SHARED = {
    "kubernetes": ("./kubernetes",),
    "coredns": ("./coredns",),
    "jobset": ("sigs.k8s.io/jobset",),
    "helm": ("helm.sh/helm/v4/cmd/helm",),
    "kueue": ("sigs.k8s.io/kueue/cmd/kueue",),
    "kwok": ("sigs.k8s.io/kwok/cmd/kwok",),
}
# Without the clouds' client libraries, which only look for targets: half the build.
TAGS = {"promtool": "remove_all_sd"}
# Built only where they are named: few tests use them, and Kubernetes is compiled in another release for this one.
ON_REQUEST = {"coscheduling": ["coscheduling"], "cosign": ["cosign"], "agent-sandbox": ["agent-sandbox-controller"]}
CONTROL_PLANE = ("kubernetes",)
CLUSTER = ("kubernetes", "helm", "containerd", "jobset", "coredns")
TOOLS = ("helm", "helm-unittest", "kubeconform", "promtool", "versitygw")
# On two cores, with empty caches.
MINUTES = {
    "kubernetes": 4.0,
    "kueue": 5.5,
    "coredns": 0.3,
    "jobset": 0.7,
    "helm": 0.7,
    "promtool": 3.0,
    "kube-router": 1.5,
    "coscheduling": 4.0,
}
# The programs are at most as large; the current ones have 1.1 GiB.
CACHE_BYTES = 3 << 30
# Go's own caches are at most as large after a build: of what is compiled, and of modules' sources.
COMPILED_BYTES, MODULES_BYTES = 4 << 30, 4 << 30
# Modules' folders can be removed.
FLAGS = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-buildvcs=false -trimpath -modcacherw",
    "GOGC": "400",  # the compiler's processes end soon
}
# The linker would strip it.
_WITHOUT_DWARF = "-gcflags=all=-dwarf=false"


def _go_root() -> Path:
    """Where Go keeps what it compiles and downloads, and what was fetched beforehand."""
    return cache_root() / "go"


@functools.cache
def _proxy() -> str:
    """GOPROXY, with the user's own module cache before it: what is there need not be downloaded."""
    words = ["go", "env", "GOMODCACHE", "GOPROXY"]
    home, proxy = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")[:2]
    there = Path(home) / "cache/download"
    return f"{there.as_uri()},{proxy}" if there.is_dir() else proxy


def _source(module: str) -> Path:
    return SOURCES / "go" / ("cluster" if module in SHARED else module)


def _go(module: str, *words: str, **environment: str) -> str:
    if shutil.which("go") is None:
        raise ClusterError("the programs are built with Go 1.26 or later, and there is no `go` on the PATH")
    root = _go_root()
    caches = {"GOCACHE": str(root / "compiled"), "GOMODCACHE": str(root / "modules"), "GOPROXY": _proxy()}
    tags = {"GOFLAGS": f"{FLAGS['GOFLAGS']} -tags={TAGS.get(module, '')}"}
    with locked(root / ".lock", fcntl.LOCK_SH):
        done = subprocess.run(
            ["go", *words],
            cwd=_source(module),
            env={**os.environ, **FLAGS, **caches, **tags, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise ClusterError(f"go {words[0]} in {_source(module)} failed")
    return done.stdout


def version(module: str, path: str) -> str:
    """The version of a Go module that one of ours requires."""
    text = (_source(module) / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s*{re.escape(path)} (v\S+)", text, re.MULTILINE)
    if not found:
        raise ClusterError(f"{_source(module)}/go.mod requires no {path}")
    return found[1]


def _ldflags(module: str) -> str:
    if module not in SHARED:
        return "-s -w"
    # Else the server says v0.0.0, which Helm charts refuse.
    release = version(module, "k8s.io/kubernetes")
    major, minor = release.removeprefix("v").split(".")[:2]
    package = "k8s.io/component-base/version"
    return f"-s -w -X {package}.gitVersion={release} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"


def folder(module: str) -> Path:
    """Where the module's programs are or will be: named by everything that goes into them."""
    source = _source(module)
    own = source / module if module in SHARED else source
    sources = sorted(p for place in {source, own} for p in place.glob("*.*") if p.suffix in {".go", ".mod", ".sum"})
    content = [part for p in sources for part in (p.name, p.read_bytes())]
    content += [*SHARED.get(module, ()), *([TAGS[module]] if module in TAGS else [])]
    return cache_root() / "bin" / f"{module}-{digest(_ldflags(module), *content)}"


def build(module: str) -> Path:
    """The folder with the module's programs, built now if they are not there; waits for another who builds them."""
    target = folder(module)
    if target.is_dir():
        os.utime(target)  # used now: see trim
    else:
        _build([module])
    return target


def _build(modules: Sequence[str]) -> None:
    """Build what is not built yet with one call of Go: one module, or any that are SHARED."""
    root = cache_root() / "bin"
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for module in sorted(modules):
            fcntl.flock(stack.enter_context((root / f".{module}.lock").open("w")), fcntl.LOCK_EX)
        modules = [module for module in modules if not folder(module).is_dir()]
        if not modules:
            return
        print(f"building {', '.join(modules)} (once; kept in {root})", file=sys.stderr, flush=True)
        started = time.monotonic()
        partial = root / f".{modules[0]}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        packages = [package for module in modules for package in _packages(module)]
        _go(modules[0], "build", _WITHOUT_DWARF, "-ldflags", _ldflags(modules[0]), "-o", f"{partial}/", *packages)
        for module in modules:
            programs = (MODULES | ON_REQUEST)[module]
            target = partial / f"{module}.programs"
            target.mkdir()
            for program in {module, *programs}:
                if (partial / program).is_file():
                    (partial / program).rename(target / program)
            for program in programs:
                if not (target / program).exists():
                    (target / program).symlink_to(module)
            target.rename(folder(module))
        partial.rmdir()
        print(f"built {', '.join(modules)} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _packages(module: str) -> Sequence[str]:
    return SHARED.get(module) or ["." if (_source(module) / "main.go").exists() else "tool"]


def build_all(modules: Sequence[str]) -> None:
    """Build those that are not built yet, after one line on what that takes, and remove old ones."""
    missing = [module for module in modules if not folder(module).is_dir()]
    if missing:
        minutes = sum(MINUTES.get(module, 1.0) for module in missing)
        print(
            f"the first build of {', '.join(missing)} takes about {minutes:.0f} minutes on two cores, 2 GiB of memory "
            f"and up to 13 GiB of disk in {cache_root()}",
            file=sys.stderr,
            flush=True,
        )
    _build([module for module in missing if module in SHARED])
    for module in modules:
        build(module)
    if missing:
        trim_go(_go_root(), COMPILED_BYTES, MODULES_BYTES)
    trim(cache_root() / "bin", {folder(module) for module in MODULES | ON_REQUEST}, CACHE_BYTES)


def trim_go(root: Path, compiled: int, modules: int) -> None:
    """Bring Go's caches below these sizes in bytes, unless somebody builds now. What was compiled and used longest ago
    goes first. Modules go all at once, with the notes of what was fetched: Go takes part of a module for all of it."""
    try:
        with locked(root / ".lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            entries = list((root / "compiled").glob("[0-9a-f][0-9a-f]/*"))
            sizes = {path: _size(path) for path in entries}
            total = sum(sizes.values())
            for path in sorted(entries, key=lambda path: path.stat().st_mtime):
                if total <= compiled:
                    break
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                total -= sizes[path]
            if _size(root / "modules") > modules:
                shutil.rmtree(root / "fetched", ignore_errors=True)
                shutil.rmtree(root / "modules")
    except BlockingIOError:
        return


def trim(root: Path, current: Collection[Path], limit: int) -> None:
    """Remove programs or archives of other versions, those that were used longest ago first, until the rest is within
    `limit` bytes."""
    sizes = {path: _size(path) for path in root.iterdir() if not path.name.startswith(("links", "."))}
    total = sum(sizes.values())
    for path in sorted(sizes.keys() - set(current), key=lambda path: path.stat().st_mtime):
        if total <= limit:
            return
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        total -= sizes[path]


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def path_of(program: str) -> Path:
    """The program, built if needed. Raises: ClusterError for one that is not ours."""
    for module, programs in (MODULES | ON_REQUEST).items():
        if program in programs:
            return build(module) / program
    raise ClusterError(f"no program {program!r} here")


def link_folder() -> Path:
    """One folder with a link to every program that is built, to put on a PATH."""
    links = cache_root() / "bin" / "links" / digest(*(str(folder(module)) for module in MODULES))
    links.mkdir(parents=True, exist_ok=True)
    for module, programs in MODULES.items():
        for program in programs:
            link = links / program
            if folder(module).is_dir() and not link.is_symlink():
                # Another process may make the same one: a rename settles it.
                mine = links / f".{program}.{os.getpid()}"
                mine.symlink_to(folder(module) / program)
                mine.rename(link)
    return links


def fetch(module: str, path: str) -> None:
    """Download the source of a Go module that one of ours requires, once a release."""
    stamp = _go_root() / "fetched" / f"{path.replace('/', '_')}-{version(module, path)}"
    if not stamp.exists():
        _go(module, "mod", "download", path)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def module_folder(module: str, path: str) -> Path:
    """The source of a Go module that one of ours requires, for the charts and schemas in it."""
    _go(module, "mod", "download", path)
    return Path(_go(module, "list", "-m", "-f", "{{.Dir}}", path).strip())
