"""The recorded runs of `dovetail ui --demo` as folders, and their page as it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.tools.run_page.demo_run import recorded
from dovetail.tools.run_page.page_server import RunList, make_page_app
from helpers.fake_kube import ServerThread


def demo_runs(folder: Path) -> Path:
    """Write all recorded runs, finished, below `folder`. Returns the first, which is whole."""
    runs = recorded(folder)
    for run in runs:
        run.write_all()
    return runs[0].folder


TOKEN = "the-users-own"


def serve_page(folder: Path) -> ServerThread:
    return ServerThread(make_page_app(RunList(folder), {"source": "folder", "folder": "runs/"}, TOKEN))


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
