"""What each image runs, and what that imports: read from the source, nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dovetail.protocol.process.process_names import (
    COORDINATOR_MODULE,
    POD_MODULE,
    RELAY_MODULE,
    SCORER_MODULE,
    SERVER_MODULE,
    TRAINER_MODULE,
)

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(ROOT / name for name in ("src", "operator", "trainer_image", "rollout_image"))


@dataclass(frozen=True)
class Image:
    """`requirements`: its list in requirements/, and `extra` what the list is compiled from. `processes`: modules that
    are started. `loaded`: modules that are loaded by name."""

    extra: str
    processes: tuple[str, ...]
    loaded: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        return ROOT / "requirements" / f"{self.extra}.txt"


IMAGES = (
    Image(
        "operator",
        ("dovetail.operator.main", "dovetail.statusapi", COORDINATOR_MODULE, RELAY_MODULE),
        (
            "dovetail.statusapi.__main__",
            "dovetail.coordinator.rewards.worker",
            "dovetail.coordinator.sessions.agent_worker",
            "dovetail.coordinator.sessions.environment_worker",
        ),
    ),
    Image("trainer", (POD_MODULE, TRAINER_MODULE)),
    Image(
        "rollout-cpu",
        (POD_MODULE, TRAINER_MODULE, SERVER_MODULE, SCORER_MODULE),
        tuple(
            f"dovetail.rollout.{name}"
            for name in (
                "plugin",
                "routes",
                "preload",
                "stage_worker",
                "sampler",
                "weights_vllm",
                "auth",
                "kv.connector",
            )
        ),
    ),
)


def third_party(image: Image) -> set[str]:
    """Top-level names of what the image's processes import from elsewhere, at any time in their life."""
    found, seen, todo = set(), set(), [*image.processes, *image.loaded]
    while todo:
        module = todo.pop()
        path = _path(module)
        if module in seen or path is None:
            continue
        seen.add(module)
        todo.append(module.rpartition(".")[0])
        for name in _imports(path):
            if name.startswith("dovetail."):
                todo.append(name)
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                found.add(name.partition(".")[0])
    return found


def _path(module: str) -> Path | None:
    for folder in FOLDERS:
        path = folder.joinpath(*module.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


@cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_names(ast.parse(path.read_text(encoding="utf-8"))))


def _names(node: ast.AST) -> Iterator[str]:
    """Also those of functions, but not those for type checkers or those whose absence is caught."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Try) and any(h.type and "ImportError" in ast.unparse(h.type) for h in node.handlers):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _names(child)
