"""`dovetail ui` serves a web page that shows live and finished runs. `dovetail report` shows the results of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dovetail.cli.common.plan_inputs import inventory
from dovetail.cli.job_arguments import run_dir_argument
from dovetail.protocol.errors import UsageError
from dovetail.protocol.process.extras import require, version

PORT = 8470


@click.command()
@click.argument("runs_folder", metavar="[RUNS_FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option("--demo", is_flag=True, help="Play a recorded run. No folder is needed.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on. 0.0.0.0: all.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="The port to listen on. 0: any free port.",
)
@click.option("--open/--no-open", "show", default=False, help="Open the page in a browser.")
def ui(runs_folder: Path | None, demo: bool, host: str, port: int, show: bool) -> None:
    """Show runs in the browser: metrics, samples, timelines, schedules and health.

    RUNS_FOLDER holds runs, or is one. A run that goes on is shown live. The address that is printed holds a token,
    without which nobody can read the runs. Nothing is written, and the page loads nothing from elsewhere.

    \b
      dovetail ui runs/
      dovetail ui --demo
    """
    require("dovetail ui", ["coordinator"])
    if demo and runs_folder is not None:
        raise UsageError("--demo plays a recorded run; leave out the folder")
    folder = runs_folder if runs_folder is not None else Path("runs")
    if not demo and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the one that holds your runs, or --demo")
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="dovetail-ui-") as scratch:
        asyncio.run(_serve(folder if not demo else None, Path(scratch), host, port, show))


async def _serve(folder: Path | None, scratch: Path, host: str, port: int, show: bool) -> None:
    """Serve the page until Ctrl-C. `folder`: the folder of runs. None: play the demo in `scratch`."""
    from dovetail.tools.run_page.demo_run import play, unpack
    from dovetail.tools.run_page.page_server import LOOPBACK, RunList, make_page_app, page_server

    mine = host in (*LOOPBACK, "::1")
    about: dict[str, Any] = {"source": "folder", "demo": folder is None, "version": version()}
    playing: asyncio.Task[None] | None = None
    if folder is None:
        recorded = unpack(scratch)
        playing = asyncio.create_task(play(recorded))
    runs = RunList(folder or scratch)
    about["folder"] = "demo" if folder is None else str(folder)
    token = secrets.token_urlsafe(24)
    app = make_page_app(runs, about, token, any_host=not mine)
    try:
        async with page_server(app, host, port) as found:
            name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            address = f"http://{name}:{found}/?token={token}"
            if not mine:
                click.echo("Warning: the address and the runs cross the network unencrypted.", err=True)
            click.echo(f"{about['folder']}: {address}  (Ctrl-C ends it)")
            if show:
                # Other users of the machine see a browser's arguments, so it gets the token in a file.
                link = scratch / "open.html"
                link.write_text(f'<meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8")
                webbrowser.open(link.as_uri())
            await asyncio.Event().wait()
    finally:
        if playing is not None:
            playing.cancel()


@click.command()
@run_dir_argument
@click.option(
    "--inventory",
    "inventory_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Prices of GPUs, as for dovetail plan: the bill then has prices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary and the bill as JSON, and write nothing.")
def report(run_dir: Path, inventory_path: Path | None, as_json: bool) -> None:
    """Show a run's table and its bill again, and write its report.html again.

    The bill says what the GPUs did, why they waited, and what was computed twice.
    """
    from dovetail.coordinator.reporting.bill import Bill
    from dovetail.coordinator.reporting.page.run_folder import RunFolder
    from dovetail.coordinator.reporting.report import write_report
    from dovetail.coordinator.reporting.run_summary import read_summary, show, show_bill

    there, prices = inventory(inventory_path, False, {}), dict[str, float]()
    for pool in there.pools if there is not None else ():
        if pool.price is not None:
            prices[pool.gpu.product] = pool.price
    summary, bill = read_summary(run_dir), Bill(RunFolder(run_dir.resolve()), prices)
    document = bill.document()
    if as_json:
        click.echo(json.dumps({"summary": summary, "bill": document}))
        return
    console = Console()
    show(console, summary)
    show_bill(console, document)
    written = write_report(run_dir, bill)
    console.print(f"\nReport:  {written}", highlight=False, markup=False, soft_wrap=True)
