"""The options of `dovetail run` without a manifest, the manifest that they stand for, and `--set`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from dovetail.gpus.nvidia_driver import driver_devices
from dovetail.manifest.checks.hub_names import hub_problem
from dovetail.manifest.checks.model_contents import model_config
from dovetail.manifest.documents import ManifestError, read_yaml
from dovetail.manifest.fixed_names import DATA_KINDS, DataKind
from dovetail.manifest.type_descriptions import named
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.errors import UsageError
from dovetail.tools.one_line import METHODS, GPUs, OneLine, document, product_label


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set fields in place, for example 'spec.ppo.iterations=3' and 'spec.groups[0].replicas=2'. Values are YAML. Raises
    UsageError."""
    for override in overrides:
        path, equals, text = override.partition("=")
        steps = _steps(path.strip())
        if not equals or not steps:
            raise UsageError(f"--set {override}: write it as field=value, for example spec.ppo.iterations=3")
        close = named(RLHFJob, str(steps[0]))
        if close and steps[0] not in close:
            # spec.ppo for ppo, and spec.ppo.iterations for iterations
            full = next((path for path in close if path == f"spec.{steps[0]}"), close[0]).replace("[]", "[0]")
            raise UsageError(f"--set {override}: did you mean {full}{path.strip()[len(str(steps[0])) :]}={text}?")
        try:
            value = read_yaml(f"value: {text}\n")["value"]
        except (ManifestError, TypeError, KeyError) as error:
            raise UsageError(f"--set {override}: the value is not valid YAML") from error
        _assign(document, steps, value, override)


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for part in path.split("."):
        name, *indices = part.split("[")
        if not name:
            return []
        steps.append(name)
        for index in indices:
            if not index.endswith("]") or not index[:-1].isdigit():
                return []
            steps.append(int(index[:-1]))
    return steps


def _assign(document: dict[str, Any], steps: list[str | int], value: Any, override: str) -> None:
    here: Any = document
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        if isinstance(step, int):
            if not isinstance(here, list) or step >= len(here):
                raise UsageError(f"--set {override}: the manifest has no list entry [{step}] there")
        elif not isinstance(here, dict):
            raise UsageError(f"--set {override}: {step} is not below a mapping in the manifest")
        if last:
            here[step] = value
        elif isinstance(step, int):
            here = here[step]
        else:
            if here.get(step) is None:
                here[step] = {}
            here = here[step]


F = TypeVar("F", bound=Callable[..., Any])
# The characters in a line of the printed manifest.
WIDTH = 120


def one_line_options(command: F) -> F:
    """Adds the options --method, --model, the data and --reward. They become parameters with these names."""
    files = (
        ("--prompts", "Prompts to answer: a file, a folder, or a data set of a hub."),
        ("--demonstrations", "Demonstrations for SFT; with another method SFT runs first."),
        (
            "--preferences",
            "Preferences, for DPO; with another method a reward model is trained on them, in place of --reward.",
        ),
    )
    options = [
        click.option("--method", type=click.Choice(list(METHODS)), help="Run this method, without a manifest."),
        click.option("--model", metavar="FOLDER_OR_HUB", help="A Hugging Face folder, or owner/name of a hub."),
        *(click.option(name, metavar="FILE", multiple=True, help=text) for name, text in files),
        click.option(
            "--reward",
            "rewards",
            metavar="MODULE:FUNCTION",
            multiple=True,
            help="A Python function that scores answers; FILE.py:FUNCTION too. Several are added up.",
        ),
        click.option("--print-only", is_flag=True, help="With --method: print the manifest, and run nothing."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given(line: dict[str, Any]) -> list[str]:
    """The options of `line` as words of a command line. They are not quoted yet."""
    words = []
    for name, value in line.items():
        values = value if isinstance(value, tuple) else (value,) if value is not None else ()
        for each in values:
            words += ["--reward" if name == "rewards" else f"--{name}", str(each)]
    return words


def manifest_of(line: OneLine, local: frozenset[str], base: Path, cpu: bool) -> dict[str, Any]:
    """The manifest that `line` means, for this machine. `local`: its names that are files or folders. `base`: the
    folder where relative ones begin. `cpu`: use CPUs even if there are GPUs. Raises UsageError."""
    longest = {kind: most for kind in DATA_KINDS if (most := _longest(line, kind, local, base))}
    made = document(line, local, None if cpu else machine_gpus(), folder_context(base / line.model), longest)
    for option, name, what in _names(line):
        if name not in local and (problem := hub_problem(name, what, Path())) is not None:
            raise UsageError(f"{option} {name} {problem}")
    return made


def _names(line: OneLine) -> list[tuple[str, str, str]]:
    """(option, name, what the name is if it exists here) of the model and of all data."""
    found = [("--model", line.model, "folder, and no model")]
    return found + [(f"--{kind}", name, "file, and no data set") for kind in DATA_KINDS for name in getattr(line, kind)]


def manifest_text(line: OneLine, overrides: Sequence[str], seed: int | None, cpu: bool) -> str:
    """The manifest as YAML. Relative paths start at the working directory. `cpu`: use CPUs even if there are GPUs.
    Raises UsageError."""
    local = frozenset(name for _, name, _ in _names(line) if Path(name).exists())
    made = manifest_of(line, local, Path(), cpu)
    apply_overrides(made, [*overrides, *([f"spec.seed={seed}"] if seed is not None else [])])
    return as_yaml(made)


def as_yaml(manifest: dict[str, Any]) -> str:
    return yaml.safe_dump(manifest, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True)


# A file with more records than this is not read to its end. Its lengths are known well by then.
_RECORDS = 20_000
# A token has at least two bytes of UTF-8 on average, in every usual text. A template adds some tokens of its own.
_BYTES_A_TOKEN, _TEMPLATE_TOKENS = 2, 64


def _longest(line: OneLine, kind: DataKind, local: frozenset[str], base: Path) -> int | None:
    """The most tokens that a record of these files can have, or its prompt. None if a data set is on a hub, or cannot
    be read, which the job says itself."""
    from dovetail.coordinator.data.data_error import DataError
    from dovetail.coordinator.data.data_files import source_files
    from dovetail.coordinator.data.formats import MESSAGE_FIELDS, PROMPT_FIELDS
    from dovetail.tools.data_look import rows_of

    names: Sequence[str] = getattr(line, kind)
    if not names or not local.issuperset(names):
        return None
    prompts = {*PROMPT_FIELDS, *MESSAGE_FIELDS, "input", "system", "history", "tools"} if kind == "prompts" else None
    most = 0
    try:
        for name in names:
            path = Path(os.path.normpath(base / name))  # the folder may not be there yet
            for _, row in itertools.islice(rows_of(source_files(path, f"--{kind}")), _RECORDS):
                if isinstance(row, dict):
                    read = {n: v for n, v in row.items() if prompts is None or n in prompts}
                    most = max(most, len(json.dumps(read, ensure_ascii=False, default=str).encode(errors="replace")))
    except DataError:
        return None
    return most // _BYTES_A_TOKEN + _TEMPLATE_TOKENS if most else None


def machine_gpus() -> GPUs | None:
    """The GPUs of the same product as the first one. None if there is no GPU, or no driver."""
    devices = driver_devices()
    if not devices:
        return None
    alike = [device for device in devices if device.name == devices[0].name]
    return GPUs(product_label(devices[0].name), len(alike), min(device.memory for device in alike))


def folder_context(model: Path) -> int | None:
    """The longest sequence of the model in a folder, in tokens. None if config.json does not say it."""
    config = model_config(model)
    found = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return found if isinstance(found, int) and found > 1 else None


def line_of(
    method: str | None,
    model: str | None,
    demonstrations: tuple[str, ...],
    preferences: tuple[str, ...],
    prompts: tuple[str, ...],
    rewards: tuple[str, ...],
    manifest: Path | None,
    print_only: bool,
) -> OneLine | None:
    """The content of the options. None if a manifest is given. Raises UsageError if options contradict each other."""
    others = {
        "--model": model,
        "--demonstrations": demonstrations,
        "--preferences": preferences,
        "--prompts": prompts,
        "--reward": rewards,
        "--print-only": print_only,
    }
    named = [name for name, value in others.items() if value]
    if manifest is not None:
        if method is not None or named:
            raise UsageError(
                f"{named[0] if method is None else '--method'} is for runs without a manifest; leave out {manifest}, "
                "or change fields of it with --set"
            )
        return None
    if method is None:
        if named:
            raise UsageError(f"{named[0]} needs --method, one of {', '.join(METHODS)}")
        raise UsageError("give a manifest (dovetail init writes one), or --method with --model and data")
    if model is None:
        raise UsageError(f"--method {method} needs --model: a Hugging Face folder, or owner/name of a hub")
    return OneLine(method, model, demonstrations, preferences, prompts, rewards)
