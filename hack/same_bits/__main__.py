"""`make same-bits`: may this change be trusted? Lint and types of what changed, the tests nearest to it, and two tiny
jobs on both trees, whose results must be the same bits. A commit whose message has a line `Bits: ...` means to change
them: then the differences are shown only."""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dovetail.tools.run_facts import Fact, difference
from same_bits.trees import JOBS, ROOT, SOURCES, Failed, Tree, git, one_at_a_time, working_tree

# A change that more test files are near to than these is for `make test-fast`.
MOST_TEST_FILES = 12
BIN = ROOT / ".venv/bin"


def choose_base(asked: str) -> str:
    """The commit with which this checkout shares its past: with BASE, origin/main or main, whichever is there."""
    for name in [asked] if asked else ["origin/main", "main"]:
        with contextlib.suppress(Failed):
            base = git("merge-base", "HEAD", git("rev-parse", "--verify", f"{name}^{{commit}}"))
            if asked or base != git("rev-parse", "HEAD") or git("status", "--porcelain"):
                return base
    if asked:
        raise Failed(f"there is no commit {asked} from which this checkout comes; give another BASE")
    return git("rev-parse", "--verify", "HEAD~")


def declared(messages: str) -> list[str]:
    """What commit messages say of bits that change."""
    return [line.partition(":")[2].strip() for line in messages.splitlines() if line.startswith("Bits:")]


def module_of(file: str) -> str | None:
    """The module that a file of the product is."""
    folder, *parts = Path(file).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__") if folder in SOURCES and file.endswith(".py") else None


def imported(source: str) -> set[str]:
    """The modules that Python code names in imports, or whose attributes these may be."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def nearest_tests(changed: Iterable[str], tests: dict[str, str], most: int = MOST_TEST_FILES) -> list[str]:
    """The test files, of those with this source, that changed or that import what changed, else another module of its
    folder. Those that import little else come first."""
    changed = list(changed)
    modules = {module for file in changed if (module := module_of(file)) is not None}
    known = {file: imported(source) for file, source in tests.items()}
    missed = {module for module in modules if not any(module in names for names in known.values())}
    folders = {module.rpartition(".")[0] for module in missed} - {"dovetail"}

    def share(file: str) -> float:
        names = {name for name in known[file] if name.startswith("dovetail.")}
        near = {name for name in names if name in modules or any(name.startswith(f"{each}.") for each in folders)}
        return 2.0 if file in changed else len(near) / max(1, len(names))

    ranked = sorted((file for file in tests if share(file)), key=lambda file: (-share(file), file))
    return ranked[:most]


def say(what: str, began: float, problem: str = "") -> bool:
    print(f"{what}: {problem or 'ok'} ({time.monotonic() - began:.0f} s)", flush=True)
    return not problem


def check(what: str, *command: str | Path, fine: tuple[int, ...] = (0,)) -> bool:
    began = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return say(what, began, f"failed\n{done.stdout.strip()}\n{what} failed" if done.returncode not in fine else "")


def check_text(changed: list[str]) -> bool:
    """Lint, types and tests of the changed files."""
    python = [file for file in changed if file.endswith((".py", ".pyi")) and (ROOT / file).exists()]
    passed = True
    if python:
        passed &= check("lint", BIN / "ruff", "check", "--quiet", "--force-exclude", *python)
        passed &= check("format", BIN / "ruff", "format", "--quiet", "--check", "--force-exclude", *python)
        passed &= check("types", BIN / "mypy")
    tests = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests/unit").rglob("test_*.py")}
    near = nearest_tests(changed, tests, len(tests))
    if near:
        chosen = near[:MOST_TEST_FILES]
        left = f", the nearest of {len(near)}" if len(near) > len(chosen) else ""
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=0", "--durations-min=5"]
        what = f"fast tests of {len(chosen)} files{left}"
        # 5: all their tests are slow.
        passed &= check(what, BIN / "python", *pytest, "-m", "not slow and not nightly", *chosen, fine=(0, 5))
    return passed


def judge_jobs(base: Tree, now: Tree, intended: list[str]) -> bool:
    """Run what is not kept yet, two jobs at a time, and compare."""
    began = time.monotonic()
    facts: dict[tuple[str, str], list[Fact] | None] = {
        (tree.name, job): tree.facts(job) for tree in (base, now) for job in JOBS
    }
    wanted = [(tree, job) for tree in (now, base) for job in JOBS if facts[tree.name, job] is None]
    if now.key(JOBS[0]) == base.key(JOBS[0]):
        wanted = [(tree, job) for tree, job in wanted if tree is now]
    for tree in dict.fromkeys(tree for tree, _ in wanted):
        tree.prepare()
    with ThreadPoolExecutor(2) as pool:
        runs = [(tree, job, pool.submit(tree.run, job)) for tree, job in wanted]
        for tree, job, run in runs:
            facts[tree.name, job] = tree.keep(job, run.result())
            say(f"{job} of {tree.name} has run", began)
    same = True
    for job in JOBS:
        mine = facts["now", job] or []
        told = difference(facts["base", job] or mine, mine)
        if told is None:
            print(f"{job}: the same bits ({len(mine)} facts)", flush=True)
        else:
            same = False
            print(f"{job}: other bits: {told}", flush=True)
    for line in intended:
        print(f"declared: Bits: {line}")
    if not same and not intended:
        print("If that is meant, commit it with a line `Bits: ...` that says what changes and why.")
    return same or bool(intended)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make same-bits", description=__doc__)
    parser.add_argument("--base", default="", help="the commit to compare with; default: origin/main, main or HEAD~")
    began = time.monotonic()
    try:
        commit = choose_base(parser.parse_args().base)
        base, now = Tree("base", git("rev-parse", f"{commit}^{{tree}}")), Tree("now", working_tree())
        changed = git("diff", "--name-only", "--no-renames", base.id, now.id).splitlines()
        print(f"BASE is {git('log', '-1', '--format=%h %s', commit)}; {len(changed)} files changed", flush=True)
        with one_at_a_time(), ThreadPoolExecutor(1) as pool:
            text = pool.submit(check_text, changed)
            passed = judge_jobs(base, now, declared(git("log", "--format=%B", f"{commit}..HEAD")))
            passed &= text.result()
    except Failed as error:
        print(error, file=sys.stderr)
        passed = False
    used = sum(
        getattr(resource.getrusage(who), name)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for name in ("ru_utime", "ru_stime")
    )
    print(f"{'passed' if passed else 'FAILED'} after {time.monotonic() - began:.0f} s and {used:.0f} CPU seconds")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
