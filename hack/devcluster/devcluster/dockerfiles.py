"""The three images from their Dockerfiles: buildah, on a base that debootstrap makes from Debian packages."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from devcluster.settings import REPOSITORY, ClusterError

SUITE = "bookworm"
BASE = f"localhost/dovetail/base:{SUITE}"
FOLDERS = {"operator": "operator", "trainer": "trainer_image", "rollout": "rollout_image"}
# How pip reaches its registry on this machine; nothing of it stays in an image.
SETTINGS = ("/etc/pip.conf", "/etc/ssl/certs", "/usr/local/share/ca-certificates")


def _run(words: list[str], **environment: str) -> None:
    done = subprocess.run(words, cwd=REPOSITORY, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words[:2])} failed with exit code {done.returncode}")


def _buildah(*words: str) -> None:
    # In a chroot: needs no runtime, and works inside a container.
    _run(["buildah", *words], BUILDAH_ISOLATION="chroot")


def _mirror() -> list[str]:
    """Where this machine's own packages come from; nothing for debootstrap's default."""
    command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    return [uri for codename, uri in (line for line in lines if len(line) == 2) if codename == SUITE][:1]


def exists(image: str) -> bool:
    return subprocess.run(["buildah", "inspect", "--type=image", image], capture_output=True).returncode == 0


def build_base() -> str:
    """The name of a minimal Debian with Python, made now if it is not there."""
    if exists(BASE):
        return BASE
    with tempfile.TemporaryDirectory(prefix="dovetail-base-") as name:
        root = Path(name) / "root"
        packages = "ca-certificates,python3,python3-venv"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root), *_mirror()]
        with (Path(name) / "log").open("w") as log:
            if subprocess.run(command, stdout=log, stderr=log, check=False).returncode != 0:
                last = Path(log.name).read_text().strip().splitlines()[-1:]
                raise ClusterError(f"debootstrap failed: {' '.join(last)}")
        for folder in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / folder, ignore_errors=True)
            (root / folder).mkdir()
        (Path(name) / "Dockerfile").write_text("FROM scratch\nCOPY root /\n")
        _buildah("build", "--quiet", "--tag", BASE, name)
    return BASE


def released() -> str:
    """The chart's appVersion: the tag that it looks for."""
    chart = (REPOSITORY / "helm/dovetail/Chart.yaml").read_text()
    return next(
        line.split(":", 1)[1].strip().strip('"') for line in chart.splitlines() if line.startswith("appVersion:")
    )


def push(names: list[str], tag: str, registry: str, as_tag: str, insecure: bool) -> dict[str, str]:
    """Pushes images that `build` made, as REGISTRY/dovetail/NAME:AS_TAG; returns the digest of each.

    Raises: ClusterError for an image that is missing, or a registry that does not take it.
    """
    pushed = {}
    for name in names:
        image = f"localhost/dovetail/{name}:{tag}"
        if not exists(image):
            raise ClusterError(f"there is no image {image} to push (make images builds it)")
        with tempfile.NamedTemporaryFile(mode="r", prefix="dovetail-digest-") as digest:
            there = f"docker://{registry.rstrip('/')}/dovetail/{name}:{as_tag}"
            flags = [f"--tls-verify={str(not insecure).lower()}", f"--digestfile={digest.name}", "--quiet"]
            _buildah("push", *flags, image, there)
            pushed[name] = Path(digest.name).read_text().strip()
    return pushed


def build(names: list[str], base: str | None, tag: str, requirements: str) -> list[str]:
    """Builds these of the three images and returns what they are called.

    Raises: ClusterError for an unknown name or a build that fails.
    """
    for name in names:
        if name not in FOLDERS:
            raise ClusterError(f"no image {name!r}: there are {', '.join(FOLDERS)}")
    if shutil.which("buildah") is None:
        raise ClusterError("images are built with buildah, which is missing (make cluster-packages installs it)")
    base = base or build_base()
    volumes = [f"--volume={path}:{path}:ro" for path in SETTINGS if Path(path).exists()]
    built = []
    for name in names:
        started = time.monotonic()
        image = f"localhost/dovetail/{name}:{tag}"
        arguments = [f"--build-arg=BASE_IMAGE={base}"]
        if name == "rollout":
            arguments.append(f"--build-arg=REQUIREMENTS={requirements}")
        dockerfile = f"--file={FOLDERS[name]}/Dockerfile"
        _buildah("build", "--network=host", "--layers", *volumes, *arguments, dockerfile, f"--tag={image}", ".")
        print(f"built {image} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        built.append(image)
    return built
