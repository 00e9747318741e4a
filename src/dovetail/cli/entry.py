"""The entry point of the `dovetail` command, which imports the rest."""

from __future__ import annotations

from typing import NoReturn


def start() -> NoReturn:
    """Run the command line. Ctrl-C ends it without a traceback, even during its imports. These may take seconds."""
    try:
        from dovetail.cli.main import main

        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
