"""Images for the cluster's own pods and for ours: archives written here, as no registry is needed for a binary or two.

An archive has the layout of `docker save`: one layer and one configuration an image, and a manifest with their names.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from devcluster import binaries
from devcluster.settings import REPOSITORY, cache_root, digest

USER = 65532
CHECKOUT = "/opt/checkout"
BUSYBOX = Path("/bin/busybox")
PASSWD = f"root:x:0:0:root:/root:/bin/sh\ndovetail:x:{USER}:{USER}:dovetail:/tmp:/bin/sh\n"
GROUP = f"root:x:0:\ndovetail:x:{USER}:\n"
CACHE_BYTES = 1 << 30  # of archives
APPLICATIONS = ("operator", "trainer", "rollout")
# What examples/quickstart-cluster.yaml names for its V100s.
EXAMPLE_IMAGE = "registry.example.com/dovetail/rollout:0.1.0-cu126"


def repository_python() -> Path:
    """The installation that the repository's .venv stands on, else this one's."""
    python = REPOSITORY / ".venv/bin/python"
    return (python.resolve() if python.exists() else Path(sys.executable).resolve()).parent.parent


def host_mounts() -> dict[str, Path]:
    """Folder in every container: what it is on this machine. Read-only, and enough to run the repository's .venv.

    The repository has a place of its own: where it is here, a pod's volume may hide it.
    """
    same = [Path("/usr"), Path("/etc/ld.so.cache"), Path("/etc/alternatives"), repository_python()]
    same = [path for path in same if path.exists()]
    outer = [path for path in same if not any(path != other and path.is_relative_to(other) for other in same)]
    return {**{str(path): path for path in outer}, CHECKOUT: REPOSITORY}


def python_path() -> str:
    """The folders of the repository that its editable installation names, as containers see them."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return ":".join(f"{CHECKOUT}/{folder}" for folder in project["tool"]["hatch"]["build"]["dev-mode-dirs"])


@dataclass
class Image:
    """`files`: bytes, or a file of this machine, by path in the image."""

    names: tuple[str, ...]
    entrypoint: list[str]
    files: dict[str, bytes | Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""

    def layer(self) -> bytes:
        output = io.BytesIO()
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            folders = {"tmp": 0o1777, **self.folders}
            parents = {str(p) for name in (*self.files, *self.links, *folders) for p in Path(name).parents if p.name}
            for name in sorted({*parents, *folders}):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, folders.get(name, 0o755)
                tar.addfile(entry)
            for name, content in self.files.items():
                data = content.read_bytes() if isinstance(content, Path) else content
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o755 if isinstance(content, Path) else 0o644
                tar.addfile(entry, io.BytesIO(data))
            for name, target in self.links.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
                tar.addfile(entry)
        return output.getvalue()

    def configuration(self, layer: bytes) -> bytes:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **self.environment}
        process = {
            "Entrypoint": self.entrypoint,
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "User": self.user,
            "WorkingDir": "/",
        }
        layers = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
        return json.dumps({"architecture": "amd64", "os": "linux", "config": process, "rootfs": layers}).encode()


def write_archive(path: Path, images: Iterable[Image]) -> None:
    manifest = []
    partial = path.with_suffix(f".{os.getpid()}")
    with tarfile.open(partial, "w") as tar:

        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        for image in images:
            layer = image.layer()
            configuration = image.configuration(layer)
            key = hashlib.sha256(configuration).hexdigest()
            add(f"{key}/layer.tar", layer)
            add(f"{key}.json", configuration)
            manifest.append({"Config": f"{key}.json", "RepoTags": list(image.names), "Layers": [f"{key}/layer.tar"]})
        add("manifest.json", json.dumps(manifest).encode())
    partial.rename(path)


def busybox() -> list[Image]:
    applets = subprocess.run([str(BUSYBOX), "--list"], check=True, capture_output=True, text=True).stdout.split()
    accounts: dict[str, bytes | Path] = {"etc/passwd": PASSWD.encode(), "etc/group": GROUP.encode()}
    return [
        Image(("dovetail-dev/pause:dev",), ["/bin/busybox", "sleep", "infinity"], {"bin/busybox": BUSYBOX}),
        Image(
            ("dovetail-dev/busybox:dev",),
            ["/bin/sh"],
            {"bin/busybox": BUSYBOX, **accounts},
            links={f"bin/{name}": "busybox" for name in applets if name != "busybox"},
            environment={"PATH": "/bin"},
        ),
    ]


def application() -> Image:
    """One image for operator, trainer and rollout: its programs are this machine's, mounted by the runtime."""
    names = (*(f"dovetail-dev/{name}:dev" for name in APPLICATIONS), EXAMPLE_IMAGE)
    links = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    mounts = {name.lstrip("/"): 0o755 for name, path in host_mounts().items() if path.is_dir()}
    environment = {
        "PATH": f"{CHECKOUT}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": python_path(),
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Image(
        names,
        [],
        {"etc/passwd": PASSWD.encode(), "etc/group": GROUP.encode(), "etc/nsswitch.conf": b"hosts: files dns\n"},
        links=links,
        folders=mounts,
        environment=environment,
        user=f"{USER}:{USER}",
    )


def _one_program(program: str, entrypoint: str) -> Image:
    """An image of one static program, run as a user who is not root."""
    path = binaries.path_of(program)
    return Image(
        (f"dovetail-dev/{program}:dev",),
        [entrypoint],
        {entrypoint.lstrip("/"): path.resolve(), "etc/passwd": PASSWD.encode()},
        user=f"{USER}:{USER}",
    )


def _cached(name: str, key: str, images: Iterable[Image]) -> Path:
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{key}.tar"
    if not path.exists():
        write_archive(path, images)
        binaries.trim(folder, {path}, CACHE_BYTES)
    return path


def _sources() -> bytes:
    return Path(__file__).read_bytes()


def cluster_archive() -> Path:
    """Everything that a cluster's nodes get at once: pause, busybox, CoreDNS, JobSet and the application image."""
    programs = [binaries.build(module) for module in ("coredns", "jobset")]
    key = digest(_sources(), BUSYBOX.read_bytes(), python_path(), *map(str, [*programs, *host_mounts()]))
    images = (*busybox(), application(), _one_program("coredns", "/coredns"), _one_program("jobset", "/manager"))
    return _cached("cluster", key, images)


def kueue_archive() -> Path:
    key = digest(_sources(), str(binaries.build("kueue")))
    return _cached("kueue", key, [_one_program("kueue", "/manager")])
