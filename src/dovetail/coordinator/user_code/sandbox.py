"""A sandbox for a user's code, made by bubblewrap: no network, its own processes and mounts, and limits.

It sees, and cannot change, the system's programs and libraries, this Python's packages and the code's folder. It may
write to /tmp and /dev/shm, which are its own and end with it. It gets none of the job's environment variables but a
few. What root starts gets a user of its own, because the kernel does not limit the processes of root."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Address space of one process, bytes. Libraries reserve more than they use.
MEMORY_BYTES = 16 << 30
# Processes and threads of one sandbox.
PROCESSES = 512
# The longest file, and everything in /tmp, bytes.
FILE_BYTES = 1 << 30
# A killed sandbox is better than a killed coordinator.
_KILLED_FIRST = 1000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "passwd", "group", "ssl")
# bubblewrap 0.8 takes --unshare-all for a wish as to users, and --disable-userns insists.
_ISOLATED = ("--unshare-user", "--unshare-all", "--disable-userns")
_ISOLATED_BY_ROOT = (
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
    *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
)
NOBODY = 65534
# The users of sandboxes that root starts are from here on.
FIRST_USER = 2_000_000_000
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Sandbox:
    """`folder` is where the code is. `hidden` has folders that it must not see, wherever they are, and `also` others
    that it sees."""

    folder: Path
    hidden: Sequence[Path] = ()
    also: Sequence[Path] = ()

    async def check(self, whose: str) -> None:
        """Raises ValueError with one sentence if none can be made here. `whose` names what runs in it."""
        if (problem := await asyncio.to_thread(self.problem)) is not None:
            what = f"{problem}, or write sandbox: None, and the {whose} may do what the job may"
            raise ValueError(f"spec.sessions.sandbox: {what}")

    def problem(self) -> str | None:
        """Why no sandbox can be made here, as a sentence's end. None if one can."""
        if os.geteuid() == 0 and self.folder.exists() and self.folder.stat().st_mode & 0o5 != 0o5:
            return f"what root starts gets a user of its own, who may not read {self.folder}; allow it (chmod o+rx)"
        return _machine_problem()

    def command(self) -> list[str]:
        """What is written before the command that runs inside."""
        given = (sys.prefix, sys.base_prefix, *sys.path, *map(str, (self.folder, *self.also)))
        wanted = [path for path in given if os.path.exists(path)]
        seen: list[str] = []
        # A path is seen as it is written, too, because inside there are no links that lead to it.
        for path in sorted({kind(path) for path in wanted for kind in (os.path.abspath, os.path.realpath)}):
            if path != "/" and not _below(path, (*seen, *_SYSTEM)):
                seen.append(path)
        # bubblewrap would make these readable by root alone.
        above = dict.fromkeys(["/etc", *(str(each) for path in seen for each in [*Path(path).parents][-2::-1])])
        hidden = [path for path in map(os.path.realpath, self.hidden) if os.path.isdir(path)]
        covered = [
            os.path.join(path, os.path.relpath(each, os.path.realpath(path)))
            for path in seen
            for each in hidden
            if _below(each, [os.path.realpath(path)])
        ]
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # Users of sandboxes are in no list of users, where some programs look for their name.
        variables = {**kept, "HOME": "/tmp", "USER": "nobody", "LOGNAME": "nobody"}
        return [
            *("bwrap", "--die-with-parent", "--clearenv", *(_ISOLATED if os.geteuid() else _ISOLATED_BY_ROOT)),
            *(part for name, value in variables.items() for part in ("--setenv", name, value)),
            *("--dev", "/dev", "--proc", "/proc", *_scratch("/tmp"), *_scratch("/dev/shm"), "--remount-ro", "/dev"),
            *(part for path in above for part in ("--perms", "0755", "--dir", path)),
            *(part for path in _SYSTEM for part in ("--ro-bind-try", path, path)),
            *(part for name in _SETTINGS for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")),
            *(part for path in seen for part in ("--ro-bind", path, path)),
            *(part for path in covered for part in ("--tmpfs", path, "--remount-ro", path)),
            *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        ]


def _scratch(path: str) -> list[str]:
    return ["--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", path]


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(each) for each in folders)


@cache
def _machine_problem() -> str | None:
    try:
        command = [*Sandbox(Path("/usr")).command(), sys.executable, "-c", ""]
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        return "bubblewrap is not installed here; install it (apt install bubblewrap)"
    if tried.returncode == 0:
        return None
    said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    if "Unknown option" in said:
        return f"bubblewrap is too old here ({said}); install version 0.8 or later"
    return (
        f"this machine lets bubblewrap make none ({said}); allow user namespaces (sysctl "
        "user.max_user_namespaces, and in a container its seccomp profile)"
    )


def limit_this_process(user: int | None) -> None:
    """Set the limits of a process in a sandbox, and of all that it starts. Root becomes `user`."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_KILLED_FIRST))
    for kind, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if user is not None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(user)


def limit_cpu_seconds(seconds: float) -> None:
    """Let this process use so much more CPU time, and each that it starts so much or a little more."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, resource.RLIM_INFINITY))
