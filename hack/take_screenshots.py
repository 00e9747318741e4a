"""Takes the pictures of docs/run-page.md and of the README. They show the demo's runs in Chromium, light and dark, wide
and narrow.

python hack/take_screenshots.py [CHROMIUM]"""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path

from dovetail.coordinator.reporting.page.run_folder import RunFolder
from dovetail.coordinator.reporting.report import write_report

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


def main() -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from helpers.demo_runs import TOKEN, demo_runs, serve_page

    chromium = sys.argv[1] if len(sys.argv) > 1 else "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = demo_runs(Path(folder))
        server = serve_page(run.parent)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])

        def take(name: str, path: str, ready: str, size: dict[str, int] = WIDE, dark: bool = False) -> None:
            shoot(name, f"{server.url}/?token={TOKEN}#/{path}", ready, size, "dark" if dark else "light")

        def shoot(name: str, address: str, ready: str, size: dict[str, int], scheme: str) -> None:
            page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(address)
            page.locator(ready).first.wait_for()
            image = Image.open(BytesIO(page.screenshot())).convert("RGB")
            image.quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET / f"run-page-{name}.png", optimize=True)
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
