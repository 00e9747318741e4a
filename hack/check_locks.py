"""`make check-locks` looks for files that two wheels of a lock both install with different contents.

    python hack/check_locks.py requirements/rollout-gpu.txt

Only the wheel that is unpacked last keeps such a file, so the other package breaks. uv finds the wheels at the registry
that it is configured for. Only the directory at the end of each wheel is read, and not its contents. This takes some
seconds for a lock of many gigabytes. The exit code is 1 for a collision, and 2 if a wheel cannot be read."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from packaging.markers import Marker
from packaging.tags import Tag, sys_tags
from packaging.utils import parse_wheel_filename

# The checksum and the size of a file, from the wheel's directory.
Stamp = tuple[int, int]
TAIL = 1 << 16
# These files build a wheel, and some wheels contain them by mistake. Nothing imports them from there.
HARMLESS = {PurePosixPath("build_backend.py"), PurePosixPath("setup.py")}


class RemoteFile(io.RawIOBase):
    """A file at a URL that is read in pieces. Raises OSError if the server does not give pieces."""

    def __init__(self, client: httpx.Client, url: str, size: int):
        self._client, self._url, self._size, self._place = client, url, size, 0
        # The piece that was fetched last. The directory is at the end.
        self._start = max(0, size - TAIL)
        self._piece = self._fetch(self._start, size)

    def _fetch(self, start: int, end: int) -> bytes:
        # If the reply were compressed, the pieces would be those of the compressed form.
        wanted = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            # The reply is streamed, because a server without pieces would send gigabytes.
            with self._client.stream("GET", self._url, headers=wanted) as reply:
                if reply.status_code != 206:
                    raise OSError(f"the registry answers {reply.status_code} to a request for a piece of it")
                return reply.read()
        except httpx.HTTPError as error:
            raise OSError(str(error) or type(error).__name__) from error

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        start, end = self._place, self._size if size < 0 else min(self._size, self._place + size)
        self._place = max(start, end)
        if start >= end:
            return b""
        if not self._start <= start <= end <= self._start + len(self._piece):
            self._start = start
            self._piece = self._fetch(start, min(self._size, max(end, start + TAIL)))
        return self._piece[start - self._start : end - self._start]


def installed_path(name: str) -> PurePosixPath:
    """The path to which a wheel's file is installed. Files of `*.data/purelib` and `platlib` go beside the modules."""
    parts = PurePosixPath(name).parts
    if parts[0].endswith(".data") and len(parts) > 2:
        return PurePosixPath(*parts[2:]) if parts[1] in ("purelib", "platlib") else PurePosixPath("/", *parts[1:])
    return PurePosixPath(*parts)


def contents(wheel: Any) -> dict[PurePosixPath, Stamp]:
    """The files that a wheel installs. `wheel` is a path or a file object. Raises OSError, zipfile.BadZipFile."""
    with zipfile.ZipFile(wheel) as archive:
        return {installed_path(i.filename): (i.CRC, i.file_size) for i in archive.infolist() if not i.is_dir()}


def collisions(packages: Mapping[str, Mapping[PurePosixPath, Any]]) -> dict[tuple[str, ...], list[PurePosixPath]]:
    """The files that differ between the packages that install them, by these packages. Equal files do no harm, nor do
    those of `HARMLESS`."""
    owners: dict[PurePosixPath, dict[str, Any]] = defaultdict(dict)
    for package, files in packages.items():
        for path, stamp in files.items():
            owners[path][package] = stamp
    found: dict[tuple[str, ...], list[PurePosixPath]] = defaultdict(list)
    for path, stamps in sorted(owners.items()):
        if len(set(stamps.values())) > 1 and path not in HARMLESS:
            found[tuple(sorted(stamps))].append(path)
    return dict(found)


def sentences(found: Mapping[tuple[str, ...], list[PurePosixPath]]) -> list[str]:
    """One sentence for each set of packages."""
    return [
        f"{' and '.join(packages)} both install {paths[0]}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
        for packages, paths in found.items()
    ]


def chosen(wheels: Iterable[Mapping[str, Any]], ranks: Mapping[Tag, int]) -> Mapping[str, Any] | None:
    """The wheel that pip would install here. `ranks` gives each tag's rank, and the best is 0."""
    rated = []
    for wheel in wheels:
        name = wheel.get("name") or wheel["url"].rsplit("/", 1)[-1]
        *_, tags = parse_wheel_filename(name.replace("%2B", "+"))
        fitting = [ranks[tag] for tag in tags if tag in ranks]
        if fitting:
            rated.append((min(fitting), name, wheel))
    return min(rated, key=lambda r: r[:2])[2] if rated else None


def wheels_of(lock: Path) -> dict[str, Mapping[str, Any]]:
    """The wheels of `lock` for this Python on this platform, by package and version. Each has `url` and `size`.

    Raises subprocess.CalledProcessError."""
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pylock.toml"
        command = [uv, "pip", "compile", "--quiet", "--no-deps", "--universal", "--python-version", "3.11"]
        subprocess.run([*command, "--format", "pylock.toml", lock, "-o", output], check=True)
        packages = tomllib.loads(output.read_text(encoding="utf-8"))["packages"]
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    found = {}
    for package in packages:
        if (marker := package.get("marker")) and not Marker(marker).evaluate():
            continue
        wheel = chosen(package.get("wheels", []), ranks)
        if wheel is None:
            print(f"{lock.name}: {package['name']} {package['version']} has no wheel here; not looked at")
        else:
            found[f"{package['name']} {package['version']}"] = wheel
    return found


def check(lock: Path, client: httpx.Client) -> dict[tuple[str, ...], list[PurePosixPath]]:
    """The collisions of `lock`. Raises OSError and subprocess.CalledProcessError."""
    wheels = wheels_of(lock)

    def read(name: str) -> dict[PurePosixPath, Stamp]:
        try:
            return contents(RemoteFile(client, wheels[name]["url"], wheels[name]["size"]))
        except (OSError, zipfile.BadZipFile) as error:
            raise OSError(f"the wheel of {name} cannot be read: {error}") from error

    with ThreadPoolExecutor(8) as pool:
        packages = dict(zip(wheels, pool.map(read, wheels), strict=True))
    files = sum(map(len, packages.values()))
    print(f"{lock.name}: {len(packages)} wheels, {files} files")
    return collisions(packages)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_locks", description=__doc__.splitlines()[0])
    parser.add_argument("locks", nargs="+", type=Path, metavar="LOCK.txt")
    arguments = parser.parse_args(argv)
    code = 0
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        for lock in arguments.locks:
            try:
                for sentence in sentences(check(lock, client)):
                    print(f"{lock.name}: {sentence}", file=sys.stderr)
                    code = 1
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{lock.name}: {error}", file=sys.stderr)
                return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
