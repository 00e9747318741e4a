"""The coordinator process: `python -m dovetail.coordinator.main`.

Exit status: 0 the job succeeded, 1 it failed (the reason is in summary.json and the last log line), 143 it was told to
stop; started again, it goes on from its store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import traceback
from pathlib import Path

from dovetail.api.callables import load_callable
from dovetail.api.env import ProcessEnv
from dovetail.api.plan import Plan
from dovetail.api.types import RLHFJob
from dovetail.coordinator.changes import ChangeError
from dovetail.coordinator.data.errors import DataError
from dovetail.coordinator.driver import run_job
from dovetail.coordinator.engines import Engines, Settings
from dovetail.coordinator.eventlog import EventLog
from dovetail.coordinator.health import UnhealthyError
from dovetail.coordinator.in_flight import GenerationError
from dovetail.coordinator.store import StoreError
from dovetail.coordinator.summary import write_json
from dovetail.coordinator.trainer_group import TrainerError

# Errors whose message is a sentence for the user, and those whose traceback helps too: starting again would only
# repeat either.
EXPLAINED = (ChangeError, DataError, StoreError, TrainerError, GenerationError, UnhealthyError)
EXPECTED = (*EXPLAINED, TimeoutError, OSError, ValueError)
# In a pod: where its status gets the reason of a failure, or the last figures, from.
TERMINATION_LOG = Path("/dev/termination-log")


def last_word(text: str) -> None:
    """Leave `text` for the kubelet, which cuts it at 4096 bytes; outside of pods nothing happens."""
    if TERMINATION_LOG.is_file():
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(text, encoding="utf-8")


async def _run(env: ProcessEnv, log: EventLog) -> int:
    job = RLHFJob.model_validate_json(env.job_file.read_text(encoding="utf-8"))
    plan = Plan.model_validate_json(env.plan_file.read_text(encoding="utf-8"))
    function = job.spec.models.reward.function
    settings = Settings(
        run_dir=env.run_dir,
        token=env.token,
        host=env.host,
        port=env.port,
        base_dir=Path.cwd(),
        reward_function=load_callable(function, "spec.models.reward.function") if function else None,
    )
    engines = Engines(job.spec, plan, settings, log)
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with engines:
            try:
                await engines.guard(run_job(engines))
            except EXPECTED as error:
                if not isinstance(error, EXPLAINED):
                    traceback.print_exc()
                reason = str(error) or type(error).__name__
                engines.fail(reason)
                last_word(reason)
                return 1
            last_word(json.dumps({**engines.status(), "instances": {}}))
    except asyncio.CancelledError:
        log("coordinator.stopped")
        return 128 + signal.SIGTERM
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; takes everything from the environment (docs/architecture.md)."""
    del argv
    env = ProcessEnv.read()
    env.run_dir.mkdir(parents=True, exist_ok=True)
    log = EventLog(env.run_dir / "events.jsonl", env.name)
    try:
        return asyncio.run(_run(env, log))
    except EXPECTED as error:
        reason = str(error) or type(error).__name__
        log("job.failed", reason=reason)
        last_word(reason)
        write_json(env.run_dir / "summary.json", {"state": "failed", "reason": reason})
        return 1
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
