"""The coordinator process: `python -m dovetail.coordinator.main`.

The exit code is 0 if the job succeeded. It is 3 if the job failed, and summary.json and the last log line then say why.
It is 143 if the process was told to stop, and 2 if the configuration is wrong. It is 1 for any other error. A restarted
coordinator then continues from its store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.coordinator.loop.engines import CoordinatorSettings, Engines
from dovetail.coordinator.loop.failure import EXPLAINED, disk_full, is_final, sentence
from dovetail.coordinator.reporting.health import UnhealthyError
from dovetail.coordinator.reporting.results import write_final_summary
from dovetail.coordinator.store.database import StoreError
from dovetail.coordinator.store.identity import has_store
from dovetail.manifest import fixed_names
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.eventlog import EventLog
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.debugger import wait_for_debugger
from dovetail.protocol.process.endings import JOB_FAILED
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.garbage import keep_what_is_here
from dovetail.protocol.process.pulse import Pulse

CRASHED = 1
# In a pod, Kubernetes reads the reason for a failure, or the last figures, from this file.
TERMINATION_LOG = Path(fixed_names.TERMINATION_LOG)
TERMINATION_BYTES = 4000
FIGURES = ("reward", "kl", "samples_per_second", "iteration_seconds")


def write_termination_message(text: str) -> None:
    """Write `text` as the container's termination message. The kubelet cuts it at 4096 bytes. Outside of pods this does
    nothing."""
    if TERMINATION_LOG.is_file():
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(text, encoding="utf-8")


def final_figures(status: Mapping[str, Any]) -> str:
    """The status as JSON, short enough for a termination message."""
    document = {**status, "instances": {}}
    if len(json.dumps(document)) > TERMINATION_BYTES:
        metrics, health = status["metrics"], status["health"]
        document["metrics"] = {name: metrics[name] for name in FIGURES if name in metrics}
        document["health"] = {**health, "verdicts": health.get("verdicts", [])[:1]} if health else {}
    return json.dumps(document)


def verdict(status: Mapping[str, Any], error: Exception) -> str:
    """One line with the last health verdicts, to be written before the reason of a failure. It is needed because the
    status may not have been read since that iteration. It is empty if the failure has another cause."""
    if not isinstance(error, UnhealthyError) or not status["health"]:
        return ""
    return json.dumps({"health": {**status["health"], "verdicts": status["health"]["verdicts"][:1]}}) + "\n"


def _explain(error: Exception, run_dir: Path) -> str:
    if not isinstance(error, EXPLAINED) and disk_full(error) is None:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    return sentence(error, run_dir)


def _discard_unwritten_logs() -> None:
    """Discard log lines that a full disk did not take. Otherwise Python would end with its own exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _text(path: Path) -> str:
    """The text of a file. Raises StoreError if the file is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is missing; `dovetail run` with the same manifest and --resume makes it again, and goes on from "
            "the store"
        ) from error


async def _run(env: ProcessEnv, log: EventLog) -> int:
    plan = Plan.model_validate_json(_text(env.plan_file))
    job = RLHFJob.model_validate_json(_text(env.job_file))
    spec = with_lag(job.spec, plan.lag)
    settings = CoordinatorSettings(
        run_dir=env.run_dir,
        token=env.token,
        host=env.host,
        port=env.port,
        base_dir=Path.cwd(),
        job=env.job,
        pods=env.config_dir is not None,
    )
    engines = Engines(spec, plan, settings, log)
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    failed = False
    beating = asyncio.create_task(Pulse.read().forever())
    try:
        async with engines:
            keep_what_is_here()
            try:
                await engines.guard(engines.run())
            except Exception as error:
                if not is_final(error):
                    raise
                reason = _explain(error, env.run_dir)
                engines.fail(reason)
                write_termination_message(verdict(engines.status(), error) + reason)
                failed = True
                await engines.copy_history()
                return JOB_FAILED
            write_termination_message(final_figures(engines.status()))
    except asyncio.CancelledError:
        log("coordinator.stopped")
        _discard_unwritten_logs()
        # The interpreter would wait for a thread with a search or a download. The engines have closed all records.
        os._exit(128 + signal.SIGTERM)
    except Exception:
        if not failed:
            raise
        return JOB_FAILED  # an error while closing is not the cause
    finally:
        beating.cancel()
    return 0


def main(argv: list[str] | None = None) -> int:
    """The entry point. All settings come from the environment (docs/architecture.md). Returns the exit code."""
    del argv
    try:
        env = ProcessEnv.read()
        wait_for_debugger(env.name, EventLog(env.name))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        write_termination_message(str(error))
        return 2
    env.run_dir.mkdir(parents=True, exist_ok=True)
    log = EventLog(env.name, env.run_dir / "events.jsonl")
    log("coordinator.started")
    try:
        return asyncio.run(_run(env, log))
    except Exception as error:
        reason = _explain(error, env.run_dir)
        write_termination_message(reason)
        if not is_final(error):
            log("coordinator.crashed", reason=reason)
            return CRASHED
        log("job.failed", reason=reason)
        if has_store(env.run_dir) or not isinstance(error, StoreError):  # else the folder may be somebody's
            with contextlib.suppress(OSError):
                write_final_summary(env.run_dir, "failed", reason)
        return JOB_FAILED
    finally:
        log.close()
        _discard_unwritten_logs()


if __name__ == "__main__":
    sys.exit(main())
