"""`make check-vllm` checks that the first and the last supported vLLM have everything that the plug-ins use of it.

    python hack/check_vllm.py [VERSION ...]

The range is `dovetail.rollout.versions`. Only the needed modules of a wheel are read, some 2 MB of 300. The check
compares the names that `dovetail.rollout` imports or lists in its `compat`, the parameters of these functions and of
the methods that its classes override, the arguments that the server is given, and the routes that the coordinator
calls. They must be those of the installed vLLM, which the tests run. The check does not see what a function does. The
exit code is 1 for a difference, and 2 if a wheel cannot be read."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
from check_locks import RemoteFile, wheels_of

from dovetail.protocol.process.extras import VLLM_DISTRIBUTIONS
from dovetail.rollout import compat
from dovetail.rollout.versions import supported

PLUGINS = Path(compat.__file__).parent
# vLLM lists the arguments of its server in these modules.
ARGUMENTS = ("vllm.engine.arg_utils", "vllm.entrypoints.launchers.cli_args")
# The coordinator calls these routes of servers besides our own (docs/extending.md).
ROUTES = (
    *("/inference/v1/generate", "/pause", "/resume", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
)
# Returns a module's source by its name, or None if there is no such module. For ROUTERS it returns the sources of all
# routers together.
Sources = Callable[[str], str | None]
ROUTERS = "routers"


def used() -> dict[str, set[str]]:
    """The names that the plug-ins import or `compat` lists, by vLLM's module. Attributes follow a dot."""
    found: dict[str, set[str]] = {}
    for path in PLUGINS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] == "vllm":
                found.setdefault(module, set()).update(alias.name for alias in node.names)
    for private in compat.PRIVATE:
        module, _, name = private.name.partition(":")
        if module.split(".")[0] == "vllm":
            found.setdefault(module, set()).add(name)
    return found


def flags() -> set[str]:
    """The arguments that the plug-ins give to vLLM's server."""
    texts = ((PLUGINS / name).read_text(encoding="utf-8") for name in ("serving/vllm_server.py", "kv/kv_config.py"))
    return {flag for text in texts for flag in re.findall(r'"(--[a-z][a-z-]+)"', text)}


def overridden() -> dict[str, set[str]]:
    """The methods of vLLM's classes that classes of the plug-ins override, by the name of vLLM's class."""
    found: dict[str, set[str]] = {}
    for path in PLUGINS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
                for base in node.bases:
                    name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
                    found.setdefault(name, set()).update(methods)
    return found


def surface(sources: Sources) -> dict[str, str]:
    """The parameters of each used item (`module:name`, `module:class.method` or `--argument`). It is `there` for an
    item that has none, or `missing`."""
    methods = overridden()
    found = {}
    for module, names in sorted(used().items()):
        text = sources(module)
        tree = ast.parse(text) if text is not None else None
        for name in sorted(names):
            node = _find(tree, name, module, sources) if tree is not None else None
            found[f"{module}:{name}"] = _parameters(node)
            if isinstance(node, ast.ClassDef):
                own = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
                for method in sorted(methods.get(name, set()) & set(own)):
                    found[f"{module}:{name}.{method}"] = _parameters(own[method])
    arguments = "".join(sources(module) or "" for module in ARGUMENTS)
    for flag in sorted(flags()):
        there = flag in arguments or flag.removeprefix("--").replace("-", "_") in arguments
        found[flag] = "there" if there else "missing"
    routers = sources(ROUTERS) or ""
    return found | {route: "there" if f'"{route}"' in routers else "missing" for route in ROUTES}


def _find(tree: ast.AST, name: str, module: str, sources: Sources) -> ast.AST | None:
    """The node that defines a name in a module. Names that the module imports count too. If a class inherits an
    attribute, it is the class itself."""
    first, _, rest = name.partition(".")
    for node in _bindings(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any((alias.asname or alias.name) == first for alias in node.names):
                return node
        elif _name(node) == first:
            if not rest:
                return node
            return next((n for n in _bindings(node) if _name(n) == rest), node if _inherits(node) else None)
    return ast.Module([], []) if not rest and sources(f"{module}.{first}") is not None else None


def _bindings(tree: ast.AST) -> Iterator[ast.AST]:
    """The definitions in a module or a class, also those within `if` and `try`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bindings(node)


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


def _inherits(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and bool(node.bases)


def _parameters(node: ast.AST | None) -> str:
    if node is None:
        return "missing"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
        return f"({', '.join(a.arg for a in every if a is not None)})"
    return "there"


def installed(module: str) -> str | None:
    """The source of a module of the installed vLLM. Nothing of vLLM is imported, because that takes long."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    if module == ROUTERS:
        routers = Path(spec.origin).parent.glob("entrypoints/**/api_router.py")
        return "".join(path.read_text(encoding="utf-8") for path in routers)
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    found = next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
    return found.read_text(encoding="utf-8") if found is not None else None


def in_wheel(wheel: zipfile.ZipFile) -> Sources:
    files = set(wheel.namelist())

    def read(module: str) -> str | None:
        if module == ROUTERS:
            routers = (n for n in files if n.startswith("vllm/entrypoints/") and n.endswith("/api_router.py"))
            return "".join(wheel.read(name).decode() for name in routers)
        path = module.replace(".", "/")
        name = next((n for n in (f"{path}.py", f"{path}/__init__.py") if n in files), None)
        return wheel.read(name).decode() if name is not None else None

    return read


def ends() -> list[str]:
    """The first and the last release in the range. Raises subprocess.CalledProcessError."""
    uv, found = Path(sys.executable).with_name("uv"), []
    for resolution in ("lowest", "highest"):
        command = [uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "--universal", "-"]
        asked = [*command, "--python-version", "3.11", "--resolution", resolution]
        done = subprocess.run(asked, input=f"vllm{supported()}", text=True, capture_output=True, check=True)
        found.append(done.stdout.strip().partition("==")[2])
    return list(dict.fromkeys(found))


def differences(version: str, client: httpx.Client, expected: dict[str, str]) -> list[str]:
    """One sentence for each difference. Raises OSError, zipfile.BadZipFile and subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "vllm.txt"
        lock.write_text(f"{VLLM_DISTRIBUTIONS[0]}=={version}\n", encoding="utf-8")
        (wheel,) = wheels_of(lock).values()
    with zipfile.ZipFile(RemoteFile(client, wheel["url"], wheel["size"])) as archive:
        found = surface(in_wheel(archive))
    return [
        f"{name} is {found.get(name, 'missing')}, where the tests have {expected[name]}"
        for name in expected
        if found.get(name, "missing") != expected[name]
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: both ends of the range")
    arguments = parser.parse_args(argv)
    expected, code = surface(installed), 0
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        try:
            for version in arguments.versions or ends():
                wrong = differences(version, client, expected)
                print(f"vLLM {version}: {len(expected)} things are used, {len(wrong)} differ")
                for sentence in wrong:
                    print(f"vLLM {version}: {sentence}", file=sys.stderr)
                    code = 1
        except (OSError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
            print(f"check_vllm: {error}", file=sys.stderr)
            return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
