"""The operator process: `python -m dovetail.operator.main`.

The exit status is 0 after SIGTERM, and 2 for a wrong configuration. It is 1 if the process lost its lease or a watch
died. Start it again then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import replace

from dovetail.operator.operator_settings import OperatorSettings


def main(argv: list[str] | None = None) -> int:
    """The entry point. It takes all settings from the environment (`dovetail.operator.operator_settings`)."""
    # These are imported here, because the planner's process imports this module again and does not need them.
    import uvloop

    from dovetail.operator.process import run

    del argv
    try:
        settings = OperatorSettings.read()
    except (OSError, ValueError) as error:
        print(f"dovetail operator: {error}", file=sys.stderr)
        return 2
    if settings.identity == OperatorSettings.identity:
        settings = replace(settings, identity=socket.gethostname())
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
