"""Asks NVIDIA's driver about this machine's GPUs. It does so without torch, so it makes no CUDA context and takes no
GPU memory."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.gpus.kernels import Capability

LIBRARY = "libcuda.so.1"
# Members of CUdevice_attribute.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 256
_NO_DEVICE = 100


class NoDriver(Exception):
    """There is no driver. The message is one sentence without a full stop."""


class BrokenDriver(ValueError):
    """There is a driver, but it does not work. The message is one sentence without a full stop."""


@dataclass(frozen=True)
class Device:
    """A GPU that this process may use. `memory` is in bytes."""

    index: int
    name: str
    capability: Capability
    memory: int


@dataclass(frozen=True)
class Driver:
    """The driver and its GPUs. `cuda`: the newest CUDA version that the driver supports, such as (13, 0)."""

    cuda: tuple[int, int]
    devices: tuple[Device, ...]


def ask_driver(library: str = LIBRARY) -> Driver:
    """The driver, with all GPUs that CUDA_VISIBLE_DEVICES allows. Raises NoDriver and BrokenDriver."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        raise NoDriver(f"{library} is not there: no NVIDIA driver reaches this process") from error
    code = cuda.cuInit(0)
    if code not in (0, _NO_DEVICE):
        raise BrokenDriver(
            f"the NVIDIA driver does not start ({_text(cuda, code)}); see whether nvidia-smi works on the node"
        )
    version = _integer(cuda, "cuDriverGetVersion")
    count = _integer(cuda, "cuDeviceGetCount") if code == 0 else 0
    devices = tuple(_device(cuda, index) for index in range(count))
    return Driver((version // 1000, version % 1000 // 10), devices)


def driver_devices() -> tuple[Device, ...]:
    """The same GPUs. Empty if there is no driver, or if it does not start."""
    try:
        return ask_driver().devices
    except (NoDriver, BrokenDriver):
        return ()


def _device(cuda: ctypes.CDLL, index: int) -> Device:
    handle = _integer(cuda, "cuDeviceGet", index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, handle)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    major, minor = (_integer(cuda, "cuDeviceGetAttribute", which, handle) for which in (_MAJOR, _MINOR))
    return Device(index, name.value.decode(errors="replace"), (major, minor), memory.value)


def _integer(cuda: ctypes.CDLL, function: str, *arguments: int) -> int:
    found = ctypes.c_int()
    _call(cuda, function, ctypes.byref(found), *arguments)
    return found.value


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    if code := getattr(cuda, function)(*arguments):
        raise BrokenDriver(f"the NVIDIA driver fails in {function} ({_text(cuda, code)})")


def _text(cuda: ctypes.CDLL, code: int) -> str:
    found = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(found))
    return found.value.decode(errors="replace") if found.value else f"error {code}"


def cuda_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> list[str]:
    """The ids to put into CUDA_VISIBLE_DEVICES. They are those that the user made visible, or else one number for each
    NVIDIA device file."""
    present = sum(1 for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return [str(i) for i in range(present)]
    ids: list[str] = []
    for device in (part.strip() for part in visible.split(",")):
        if device in ("", "-1"):
            break  # CUDA ignores everything after an invalid entry
        ids.append(device)
    return ids
