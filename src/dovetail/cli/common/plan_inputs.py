"""Reads what the planner needs besides a manifest: the models' configurations, the figures of GPUs, an inventory, and
the profile of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dovetail.gpus.gpu_products import GPU, HardwareError, described, parse
from dovetail.gpus.inventory import Inventory, InventoryError, read
from dovetail.manifest.checks.files import model_configs
from dovetail.manifest.checks.model_contents import model_config
from dovetail.manifest.types import RLHFJobSpec
from dovetail.protocol.errors import RunError, UsageError, last_said
from dovetail.protocol.files.machine_profile import Profile

KUBECTL_SECONDS = 60.0


def configurations(spec: RLHFJobSpec, base: Path) -> dict[str, dict[str, Any]]:
    """The config.json of each model that is in a folder, or in a hub repository that was downloaded before."""
    found = model_configs(spec, base)
    for name in ("actor", "critic", "reward", "reference"):
        source = getattr(spec.models, name).source
        if name not in found and source is not None and source.hugging_face is not None:
            config = _cached(source.hugging_face, source.revision)
            if config is not None:
                found[name] = config
    return found


def _cached(repository: str, revision: str | None) -> dict[str, Any] | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # the extras install it; without them nothing was downloaded
        return None
    try:
        path = try_to_load_from_cache(repository, "config.json", revision=revision)
        config = model_config(Path(path).parent) if isinstance(path, str) else None
    except (OSError, ValueError):  # the hub's own error for a name that is not valid is a ValueError too
        return None
    return config if isinstance(config, dict) else None


def hardware(path: Path | None) -> dict[str, GPU]:
    """The figures in a hardware file: TOML that `dovetail profile` wrote, or YAML as in the chart's jobs.gpuProducts.
    Raises UsageError."""
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml", ".json"):
            return described(yaml.safe_load(text))
        return parse(text, measured=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except (HardwareError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from error


def inventory(path: Path | None, cluster: bool, measured: Mapping[str, GPU]) -> Inventory | None:
    """The inventory in a file, or that of the nodes that kubectl shows. Raises UsageError and RunError."""
    if path is None and not cluster:
        return None
    try:
        text = path.read_text(encoding="utf-8") if path is not None else _nodes()
        return read(yaml.safe_load(text), measured)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path} is neither YAML nor JSON{where}.") from error
    except InventoryError as error:
        raise UsageError(f"{path or 'the cluster'}: {error}") from error


def _nodes() -> str:
    command = ["kubectl", "get", "nodes", "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=False)
    except FileNotFoundError as error:
        raise UsageError("--cluster needs kubectl, which is not installed; give a file with --inventory.") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"kubectl get nodes gave no answer within {KUBECTL_SECONDS:.0f} s.") from error
    if done.returncode:
        raise RunError(f"kubectl get nodes failed: {last_said(done.stderr, 'no reason given')}")
    return done.stdout


def local_profile(path: Path | None, run_dir: Path) -> Profile | None:
    """The profile of this machine. It is the one in `path`, or that of the run directory. None if there is none. If the
    directory has a run, the profile gets the run's response lengths. Raises UsageError."""
    here = run_dir / "profile.json"
    found = read_profile(path or here) if path is not None or here.exists() else None
    if found is None or found.machine is None:
        return found
    from dovetail.tools.calibrate.observe import run_lengths

    machine = found.machine.model_copy(update={"responses": run_lengths(run_dir)})
    return found.model_copy(update={"machine": machine})


def read_profile(path: Path) -> Profile:
    """A profile that `dovetail profile` wrote. Raises UsageError."""
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path} is no profile: {where}: {first['msg']}; make one with dovetail profile.") from error
