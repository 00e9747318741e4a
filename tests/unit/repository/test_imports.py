"""Imports point one way: the folder table of docs/architecture.md, read by this test, holds for every import."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
NO_TORCH = (
    "manifest",
    "protocol",
    "pipelines",
    "fusion",
    "planner",
    "coordinator",
    "kube",
    "operator",
    "statusapi",
    "launch",
    "pod",
    "client",
)
HEAVY = {"torch", "vllm"}
# What reads or writes anything but its arguments.
INPUT_OUTPUT = {
    *("aiohttp", "asyncio", "http", "httpx", "io", "multiprocessing", "os", "pathlib", "requests", "select", "shutil"),
    *("signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "yaml"),
}


def table() -> dict[str, tuple[Path, set[str]]]:
    """Package name -> (folder of its source, packages it may import)."""
    found = {}
    text = (ROOT / "docs" / "architecture.md").read_text()
    for row in re.findall(r"^\| `(\w+)/` \| `dovetail\.(\w+)` \|.*\| ([^|]+) \|$", text, re.MULTILINE):
        folder, package, allowed = row
        earlier = set(found)
        names = earlier if "all of the above" in allowed else set(re.findall(r"\w+", allowed))
        found[package] = (ROOT / folder / "dovetail" / package, names)
    return found


TABLE = table()


def below_dovetail(path: Path) -> tuple[str, ...]:
    """The path's parts after the package's root; the checkout's own folder may be called dovetail, too."""
    parts = path.parts
    return parts[len(parts) - parts[::-1].index("dovetail") :]


def for_type_checkers(tree: ast.Module) -> set[int]:
    """The ids of the nodes below `if TYPE_CHECKING`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


class Parsed(NamedTuple):
    """What is asked of a file. `imports`: those wherever in the file, and whether only type checkers see them.
    `classes`: the names at the top level."""

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]]
    classes: list[str]


@cache
def parsed(path: Path) -> Parsed:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    hidden = for_type_checkers(tree) if "TYPE_CHECKING" in text else set()
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Parsed([(node, id(node) in hidden) for node in nodes], classes)


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """(line, absolute module, whether only type checkers see it) of every import, wherever in the file."""
    package = ".".join(below_dovetail(path)[:-1])
    found = []
    for node, hidden in parsed(path).imports:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, hidden) for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                parts = f"dovetail.{package.removeprefix('dovetail.')}".split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "dovetail" else [base]
            found += [(node.lineno, name, hidden) for name in names]
    return found


def sources(package: str) -> list[Path]:
    return sorted(TABLE[package][0].rglob("*.py"))


def test_the_table_names_every_package():
    assert set(TABLE) == {path.parent.name for path in ROOT.glob("*/dovetail/*/__init__.py")}
    assert TABLE["manifest"][1] == TABLE["pipelines"][1] == set()
    assert TABLE["coordinator"][1] == {"manifest", "protocol", "pipelines", "fusion", "web"}
    for package, (folder, allowed) in TABLE.items():
        assert folder.is_dir(), package
        assert allowed <= set(TABLE), package


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(TABLE))
def test_imports_point_one_way(package):
    allowed = TABLE[package][1] | {package}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for line, module, _ in imports(path)
        if module.split(".")[0] == "dovetail" and module.split(".")[1] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", NO_TORCH)
def test_no_torch_and_no_vllm(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for line, module, types_only in imports(path)
        if module.split(".")[0] in HEAVY and not types_only
    ]
    assert wrong == []


def test_the_planner_is_pure():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources("planner") + sources("pipelines") + sources("fusion")
        for line, module, _ in imports(path)
        if module.split(".")[0] in INPUT_OUTPUT
    ]
    assert wrong == []


def test_the_planners_folders_form_no_circle():
    """A file beside the folders counts for itself."""
    root, graph = TABLE["planner"][0], {}
    for path in sources("planner"):
        mine = path.relative_to(root).with_suffix("").parts[0]
        for _, module, _ in imports(path):
            other = module.removeprefix("dovetail.planner.").split(".")[0]
            if module.startswith("dovetail.planner.") and other != mine:
                graph.setdefault(mine, set()).add(other)
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_dovetail_is_a_namespace_package():
    """One folder a process, installed together or apart: none may own the name."""
    assert [str(p) for p in ROOT.glob("*/dovetail/__init__.py")] == []


@pytest.mark.parametrize("folder", sorted(p.parent.name for p in ROOT.glob("*/dovetail") if p.is_dir()))
def test_no_folder_hides_a_standard_library_module(folder):
    """A folder `operator/` with an __init__.py would be found before the standard library's operator."""
    if folder in sys.stdlib_module_names:
        assert not (ROOT / folder / "__init__.py").exists()


def test_relative_imports_are_seen(tmp_path):
    path = tmp_path / "planner" / "dovetail" / "planner" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from . import a\nfrom .b import c\nfrom ..trainer import d\nfrom dovetail import rollout\n")
    assert [m for _, m, _ in imports(path)] == [
        *("dovetail.planner", "dovetail.planner.b", "dovetail.trainer", "dovetail.rollout")
    ]


def all_modules() -> dict[str, Path]:
    """The file of each module, by its dotted name."""
    found = {}
    for package in TABLE:
        for path in sources(package):
            name = ".".join(["dovetail", *below_dovetail(path.with_suffix(""))])
            found[name.removesuffix(".__init__")] = path
    return found


def folders() -> dict[str, set[str]]:
    """Folder of modules, as a dotted name -> folders that its files import, types included."""
    modules = all_modules()
    found: dict[str, set[str]] = {}
    for path in modules.values():
        folder = ".".join(["dovetail", *below_dovetail(path)[:-1]])
        for module in imported_files(path, modules):
            isfile = modules[module].name != "__init__.py"
            found.setdefault(folder, set()).add(module.rsplit(".", 1)[0] if isfile else module)
    return found


def imported_files(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Those of `modules` that the file imports, also those that only type checkers see."""
    for node, _ in parsed(path).imports:
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (
                name if name in modules else node.module or "" for name in names if {name, node.module} & modules.keys()
            )
        else:
            yield from (alias.name for alias in node.names if alias.name in modules)


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for other in graph.get(todo.pop(), set()) - seen:
            seen.add(other)
            todo.append(other)
    return seen


def family(one: str, other: str) -> bool:
    """A folder and one inside of it may import each other."""
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")


def test_no_folders_import_each_other():
    """Between folders imports go one way, those of types too."""
    graph = {
        folder: {o for o in others if o != folder and not family(o, folder)} for folder, others in folders().items()
    }
    circles = sorted(folder for folder in graph if folder in reached(folder, graph))
    assert circles == []


def test_no_files_import_each_other():
    """No circle, however long. An import within a function counts too, and one that only type checkers see."""
    modules = all_modules()
    graph = {module: {*imported_files(path, modules)} - {module} for module, path in modules.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


# An attribute whose name begins with an underscore, and everything that gives one of our own objects such an attribute.
UNDERSCORED = re.compile(r"[\w)\]]\.(_[a-z]\w*)")
OUR_OWN = re.compile(
    r"(?:def|class) (_\w+)|\.(_\w+)(?:\[.*\])?(?:: .+)? [-+|*]?=[^=]|\.(_\w+), |^\s*(_\w+)(?::| =)", re.M
)
# Python documents these as public.
DOCUMENTED = {"_bootstrap", "_bootstrap_external", "_current_frames", "_exit", "_local", "_replace"}
# vLLM gives it to connectors to call.
FOR_PLUGINS = {"_get_connector_metadata"}


def test_private_parts_of_libraries_are_used_in_compat_alone():
    """Also those that a subclass inherits from a library."""
    texts = {path: path.read_text() for package in TABLE for path in sources(package) if path.name != "compat.py"}
    own = {name for text in texts.values() for names in OUR_OWN.findall(text) for name in names if name}
    wrong = [
        f"{path.relative_to(ROOT)} uses {name}"
        for path, text in texts.items()
        for name in UNDERSCORED.findall(text)
        if name not in own | DOCUMENTED | FOR_PLUGINS
    ]
    assert wrong == []


# Conventional names: a package's entry point, and where it gathers private APIs of libraries.
REPEATED_FILES = {"__init__.py", "__main__.py", "compat.py", "main.py"}
# Errors that a trainer rank and the coordinator both know by this name. A job is what the loop runs, and an answer of
# the status API.
REPEATED_CLASSES = {"CheckpointDamaged", "StaleGeneration", "Job"}


def repeated(found: list[tuple[str, Path]]) -> list[str]:
    places: dict[str, set[str]] = {}
    for name, path in found:
        places.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return sorted(f"{name}: {', '.join(sorted(where))}" for name, where in places.items() if len(where) > 1)


def test_a_file_name_says_which_file_is_meant():
    files = [(path.name, path) for package in TABLE for path in sources(package)]
    assert repeated([each for each in files if each[0] not in REPEATED_FILES]) == []


def test_a_class_name_says_which_class_is_meant():
    classes = [
        (name, path)
        for package in TABLE
        for path in sources(package)
        for name in parsed(path).classes
        if not name.startswith("_")
    ]
    assert repeated([each for each in classes if each[0] not in REPEATED_CLASSES]) == []
