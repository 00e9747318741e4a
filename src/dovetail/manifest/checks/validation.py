"""Reads manifests. `load_manifest` returns a job that can run, or raises ManifestError with sentences for the user."""

from __future__ import annotations

from pathlib import Path

from dovetail.manifest.checks.files import check_files
from dovetail.manifest.checks.name_rules import check_name
from dovetail.manifest.checks.rules import check
from dovetail.manifest.checks.unexecuted import warnings
from dovetail.manifest.documents import ManifestError, is_file, parse, read_yaml, with_home
from dovetail.manifest.resolve import absolute_paths, resolve
from dovetail.manifest.types import RLHFJob

__all__ = [
    "ManifestError",
    "absolute_paths",
    "check",
    "check_files",
    "load_manifest",
    "parse_manifest",
    "resolve",
    "warnings",
]


def parse_manifest(path_or_text: str | Path) -> RLHFJob:
    """The job as written. Its fields and the rules between them are checked. Raises ManifestError."""
    return _checked(parse(read_yaml(path_or_text)))


def _checked(job: RLHFJob) -> RLHFJob:
    if errors := [*check_name(job.metadata.name, job.spec), *check(job.spec)]:
        raise ManifestError(errors)
    return job


def load_manifest(path_or_text: str | Path, base_dir: Path | None = None) -> RLHFJob:
    """The job from which a run starts. It is the result of `parse_manifest` with every default filled in (`resolve`)
    and absolute local paths.

    `~` is the home folder. Relative paths start at `base_dir`. Its default is the manifest's folder, or the working
    directory for a manifest given as text. Call `warnings` with the job as written (`parse_manifest`), because
    resolving removes what some warnings are about. `check_files` checks the files themselves. Raises ManifestError."""
    job = _checked(parse(with_home(read_yaml(path_or_text))))
    if base_dir is None:
        base_dir = Path(path_or_text).parent if is_file(path_or_text) else Path()
    return absolute_paths(job.model_copy(update={"spec": resolve(job.spec)}), base_dir)
