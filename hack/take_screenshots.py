r"""Takes the pictures of docs and of the README in Chromium. Those of pages show the demo's runs, light and dark, wide
and narrow. Those of a terminal (--terminal) show what commands say of runs that were made for them:

    small="--set spec.sft.steps=60 --set spec.reward.steps=60 --set spec.ppo.iterations=6 --set spec.ppo.lag=1"
    dovetail run examples/quickstart.yaml $small --run-dir runs/demo         # kill -9 its coordinator meanwhile
    dovetail run examples/quickstart.yaml $small --run-dir runs/demo-again --set spec.generation.temperature=0.61
    dovetail run examples/quickstart.yaml $small --run-dir runs/stalled 2>&1 | grep -E "^PPO|^Warning" > stalled.txt
                                                                             # kill -STOP a trainer meanwhile

That of the calculator (--calculator) shows the built site:

    make docs && python3 -m http.server --directory build/site 8000

python hack/take_screenshots.py [--terminal FOLDER | --calculator http://127.0.0.1:8000] [CHROMIUM]

FOLDER has `runs` and stalled.txt."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
TARGET = ROOT / "docs" / "images"
WIDE, NARROW = {"width": 1000, "height": 680}, {"width": 400, "height": 700}
TALL = {"width": 1150, "height": 860}
# The number of colours of a picture. A page has few, and so the file becomes a third as large.
COLOURS = 96


def moved(run: Path) -> tuple[int, int]:
    """The newest iteration whose tokens are kept, and a prompt with a sample that another server continued."""
    folder = RunFolder(run)
    iteration = folder.batch_iterations()[-1]
    moves = folder.moves(iteration)
    return iteration, moves[0]["sample"][1] if moves else 5


def save(name: str, picture: bytes, colours: int = COLOURS) -> None:
    from PIL import Image

    image = Image.open(BytesIO(picture)).convert("RGB")
    image.quantize(colours, dither=Image.Dither.NONE).save(TARGET / f"{name}.png", optimize=True)


def terminals(browser: Browser, folder: Path) -> None:
    """The pictures of a terminal."""
    commands = {"audit": "audit runs/demo", "diff": "debug diff runs/demo runs/demo-again", "bill": "report runs/demo"}
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"}
    for name, words in commands.items():
        command = [str(Path(sys.executable).with_name("dovetail")), *words.split()]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = done.stdout if name != "bill" else done.stdout[done.stdout.rindex("\n", 0, done.stdout.index("Bill")) :]
        _terminal(browser, name, f"$ dovetail {words}\n{said}")
    _terminal(browser, "stalled", (folder / "stalled.txt").read_text())


def _terminal(browser: Browser, name: str, said: str) -> None:
    console = Console(record=True, file=StringIO(), width=100)
    console.print(Text.from_ansi(said))
    page = browser.new_page(viewport={"width": 1000, "height": 600})
    page.set_content(console.export_html(theme=DIMMED_MONOKAI, inline_styles=True))
    page.add_style_tag(content="pre {padding: 12px 16px; font-size: 14px; background: #191919}")
    save(f"terminal-{name}", page.locator("pre").screenshot(), colours=16)
    page.close()


def calculator(browser: Browser, address: str) -> None:
    """The picture of the calculator's answer."""
    page = browser.new_page(viewport=TALL)
    page.set_default_timeout(900_000)
    page.goto(f"{address}/calculator.html")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("pre.manifest").wait_for()
    page.evaluate("document.querySelector('p.told').scrollIntoView()")
    save("calculator", page.screenshot())


def main() -> None:
    from playwright.sync_api import sync_playwright

    from helpers.demo_runs import TOKEN, demo_runs, serve_page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terminal", type=Path, metavar="FOLDER")
    parser.add_argument("--calculator", metavar="ADDRESS")
    parser.add_argument("chromium", nargs="?", default="/usr/bin/chromium")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox", "--disable-gpu"])
        if given.terminal is not None:
            terminals(browser, given.terminal)
            return
        if given.calculator is not None:
            calculator(browser, given.calculator)
            return
        run = demo_runs(Path(folder))
        server = serve_page(run.parent)

        def take(name: str, path: str, ready: str, size: dict[str, int] = WIDE, dark: bool = False) -> None:
            shoot(name, f"{server.url}/?token={TOKEN}#/{path}", ready, size, "dark" if dark else "light")

        def shoot(name: str, address: str, ready: str, size: dict[str, int], scheme: str) -> None:
            page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(address)
            page.locator(ready).first.wait_for()
            save(f"run-page-{name}", page.screenshot())
            page.close()

        last, prompt = moved(run)
        take("overview", f"run/{run.name}/overview", "svg[data-chart] path")
        take("unhealthy", "run/quickstart-little-sft/overview", "svg[data-chart] path")
        take("sample", f"run/{run.name}/sample/{last}/{prompt}/0", ".tokens span", dark=True)
        take("schedule", f"run/{run.name}/schedule", "svg[data-lanes] rect")
        take("timeline", f"run/{run.name}/timeline", "svg[data-lanes] rect", dark=True)
        take("side-by-side", f"run/{run.name}/samples/evaluation/side", "table")
        take("narrow", f"run/{run.name}/samples", "table", size=NARROW)
        names = "/".join(path.name for path in sorted(run.parent.iterdir()))
        take("compare", f"compare/{names}", "svg[data-chart] path")
        shoot("report", write_report(run).as_uri(), "svg[data-chart] path", TALL, "light")
        browser.close()
        server.close()


if __name__ == "__main__":
    main()
