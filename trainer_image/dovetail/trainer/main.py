"""Runs one trainer rank: `python -m dovetail.trainer.main`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from pathlib import Path

import torch
from pydantic import ValidationError

from dovetail.gpus.gpu_failure import GPUFailed
from dovetail.gpus.kernel_check import my_capability
from dovetail.manifest.resolve import ppo_config, with_lag
from dovetail.manifest.types import Parallelism, RLHFJob, Stage
from dovetail.protocol.eventlog import EventLog
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.debugger import wait_for_debugger
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.inheritance import keep_freed_memory, use_expandable_segments
from dovetail.trainer.rank.coordinator_client import (
    CoordinatorClient,
    CoordinatorUnreachable,
    RankProcess,
    Refused,
)

PATIENCE_SECONDS = 600.0


def main(argv: list[str] | None = None) -> int:
    """Run the rank. Returns 0 after `stop`, 2 for an error that a restart cannot fix, and 1 for any other error."""
    parser = argparse.ArgumentParser(
        prog="python -m dovetail.trainer.main",
        description="One trainer rank of a job, configured by DOVETAIL_* variables; `dovetail run` starts it.",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="how long an absent coordinator is waited for (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    # Python cannot run a signal handler while it is blocked in a collective. So let the signals end the process at
    # once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = EventLog("trainer")
    use_expandable_segments(os.environ)
    keep_freed_memory(os.environ)
    try:
        env = ProcessEnv.read()
        log = EventLog(env.name)
        wait_for_debugger(env.name, log)
        plan = read_plan(env.plan_file, env)
        job = read_job(env.job_file, plan)
        return serve(env, job, plan.parallelism, options.patience, log)
    except (CoordinatorUnreachable, Refused, GPUFailed, ValueError, OSError) as error:
        log("rank.failed", message=str(error))
        # 2 means that a restart would not help.
        return 2 if isinstance(error, ValueError | Refused) else 1


def serve(env: ProcessEnv, job: RLHFJob, layouts: dict[str, Parallelism], patience: float, log: EventLog) -> int:
    """Run the rank until it is told to stop. Returns 0. Raises ValueError for a user's function that does not work, and
    for a GPU for which torch has no kernels. Raises CoordinatorUnreachable, Refused and GPUFailed."""
    my_capability()
    client = CoordinatorClient(env.coordinator, env.token, patience)
    # torch would end this process when a peer is lost. Instead, the heartbeat thread aborts the groups.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # After the checks above, because these imports are slow.
    from dovetail.trainer.algorithms.policy import rehearse_loss
    from dovetail.trainer.engine.engine import choose_algorithms
    from dovetail.trainer.functions import rehearse_advantages
    from dovetail.trainer.rank.heartbeat import HeartbeatThread
    from dovetail.trainer.rank.life import Rank
    from dovetail.trainer.rank.metrics import TrainerMetrics

    if Stage.PPO in job.spec.stages:
        rehearse_loss(job.spec.ppo)
        rehearse_advantages(ppo_config(job.spec))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    choose_algorithms(job.spec.trainer.deterministic)
    torch.manual_seed(job.spec.seed)

    incarnation = uuid.uuid4().hex
    metrics = TrainerMetrics()
    if env.metrics_port:
        metrics.serve(env.metrics_port, env.host)
    heartbeat = HeartbeatThread(RankProcess(env.name, client, log), env.rank, incarnation)
    heartbeat.start()
    log("rank.started", rank=env.rank, world_size=env.world_size, threads=torch.get_num_threads(), pid=os.getpid())
    try:
        Rank(
            env=env,
            spec=job.spec,
            layouts=layouts,
            client=client,
            heartbeat=heartbeat,
            metrics=metrics,
            log=log,
            incarnation=incarnation,
            nccl_version=_nccl_version(),
        ).run()
    finally:
        heartbeat.stop()
    log("rank.ended")
    return 0


def read_job(path: Path, plan: Plan) -> RLHFJob:
    """The job. If its manifest says Auto for the lag, it gets the plan's lag. Raises ValueError if job.json does not
    hold a valid job, and OSError if it is missing."""
    try:
        job = RLHFJob.model_validate_json(path.read_text(encoding="utf-8"))
        return job.model_copy(update={"spec": with_lag(job.spec, plan.lag)})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place}: {first['msg']}") from error


def read_plan(path: Path, env: ProcessEnv) -> Plan:
    """The plan. Raises ValueError if plan.json is not a plan for this many ranks, and OSError if it is missing."""
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if plan.world_size != env.world_size or not 0 <= env.rank < env.world_size:
        raise ValueError(
            f"this process is trainer rank {env.rank} of {env.world_size}, {path} has {plan.world_size} ranks"
        )
    return plan


def _nccl_version() -> str | None:

    if not torch.cuda.is_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, because threads of torch's backends may wait there for peers that are gone.
    os._exit(code)
