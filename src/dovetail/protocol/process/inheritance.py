"""What the processes of a job on one machine inherit from the user's environment: everything but the variables here.

Pods have the environment of the manifest's `podTemplate` instead, where users set such variables on purpose."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
# Gloo and NCCL would listen on an interface that other machines reach, or look for one that this machine lacks.
LOOPBACK_SOCKETS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
# These tell a program its place in a group of processes, and how the group meets and treats errors. Another launcher
# (torchrun, accelerate, a notebook) leaves them. A job has groups of its own.
_ANOTHER_GROUPS = re.compile(
    r"""MASTER_(ADDR|PORT)
    |((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|TORCHELASTIC_.*|PET_.*|ACCELERATE_.*|FSDP_.*
    |(TORCH_)?GLOO_.*|TORCH_NCCL_.*|NCCL_(COMM_ID|SOCKET_.*|ASYNC_ERROR_HANDLING|BLOCKING_WAIT)
    |TP_SOCKET_IFNAME|UCX_NET_DEVICES|USE_LIBUV|TORCH_DISTRIBUTED_DEBUG
    |DOVETAIL_(JOB|NAME|RUN_DIR|COORDINATOR|TOKEN|HOST|PORT|METRICS_PORT|GROUP|RANK|WORLD_SIZE)
    |DOVETAIL_(CONFIG_DIR|INDEX|SURPLUS|PULSE|SERVED_TEMPERATURE)
    """,
    re.VERBOSE,
)
# What the manifest says (vllmArgs, dtype) decides. VLLM_API_KEY and the like are for servers that users start.
_SETTINGS = re.compile(r"VLLM_(?!CACHE_ROOT$).*|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_PROXY = re.compile(r"(http|https|all)_proxy", re.IGNORECASE)


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine, to which no proxy leads."""
    return urlsplit(url).hostname in LOOPBACK_HOSTS


def on_this_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that talk to each other on this machine alone. Proxies stay, for downloads,
    trackers and users' functions, but not for this machine's own addresses."""
    kept = {name: value for name, value in environ.items() if not _ANOTHER_GROUPS.fullmatch(name)} | LOOPBACK_SOCKETS
    if any(_PROXY.fullmatch(name) for name in kept):
        past = [host.strip() for name in ("no_proxy", "NO_PROXY") for host in kept.get(name, "").split(",")]
        direct = "*" if "*" in past else ",".join(dict.fromkeys(filter(None, [*past, *LOOPBACK_HOSTS])))
        kept |= {"no_proxy": direct, "NO_PROXY": direct}
    return kept


def inherited(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a job's processes. `threads`: OMP_NUM_THREADS, unless the user's is a number."""
    kept = {name: value for name, value in on_this_machine(environ).items() if not _SETTINGS.fullmatch(name)}
    if not re.fullmatch("0*[1-9][0-9]*", kept.get("OMP_NUM_THREADS", "")):
        kept["OMP_NUM_THREADS"] = str(threads)
    return {"TOKENIZERS_PARALLELISM": "false", **kept}


# `dovetail.models` sets it when it is imported, for MKL to read at its first product.
_SET_BY_IMPORTS = ("MKL_CBWR",)


def take_environment(environ: MutableMapping[str, str], given: Mapping[str, str]) -> None:
    """Replace the environment of a process that was forked with its imports made, as if it had made them itself: what
    they set stays, unless it is given."""
    kept = {name: environ[name] for name in _SET_BY_IMPORTS if name in environ}
    environ.clear()
    environ.update({**kept, **given})


# torch's settings of its CUDA allocator. The newer name comes first.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its memory segments, so that almost nothing is lost to fragmentation. Call it
    before the process allocates on a GPU. A user's own settings stay as they are. Do not call it for vLLM, whose sleep
    mode does not work with expandable segments."""
    if not any(name in environ for name in _ALLOCATOR):
        environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


# glibc's names and numbers of mallopt(3), and the values below. 32 MiB is the largest threshold that glibc takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 512 * 2**20, 32 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Let malloc keep what a training step frees for the next step, up to 512 MiB at the heap's end. glibc would give
    it back to the kernel, and each step would wait for the kernel to clear the same pages again. A user's own settings
    of malloc stay as they are. Other C libraries are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environ):
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
