"""Starts a rollout's server from the job's own files. It is vLLM's stock API server with Dovetail's plug-ins, or
another backend (`dovetail.rollout.backend`).

    python -m dovetail.rollout.serving.vllm_server

reads the `DOVETAIL_*` environment and job.json, writes vLLM's arguments and environment, registers with the
coordinator and serves until SIGTERM."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.gpus.kernel_check import my_capability
from dovetail.gpus.kernels import serving_dtype, show
from dovetail.manifest.accelerators import SLEEP
from dovetail.manifest.checks.scratch import cpu_head_error, head_size
from dovetail.manifest.model_families.support import family_of, replay_error, served_problem, text_part
from dovetail.manifest.resolve import with_lag
from dovetail.manifest.sizes import relays_weights
from dovetail.manifest.training_types import AUTO_LAG
from dovetail.manifest.types import Group, RLHFJob, Role
from dovetail.protocol.budgets import KV_BLOCK_TOKENS
from dovetail.protocol.http.header_deadline import SERVER_KEEP_SECONDS, HeaderDeadline
from dovetail.protocol.plan import Plan, Rollout
from dovetail.protocol.process.env import ACTOR_CONFIG, ProcessEnv
from dovetail.protocol.process.pulse import PULSE
from dovetail.protocol.sampling import COUNTER_SAMPLER, SERVED_TEMPERATURE, served_temperature
from dovetail.rollout.backend import ServerPlan, load_backend
from dovetail.rollout.kv.kv_config import KVSetup, prepare
from dovetail.rollout.serving.weights_worker import SENDING_WORKER, WEIGHTS_WORKER
from dovetail.rollout.versions import build_problem, installed, version_problem

# The server waits so long for the actor's config.json, which the coordinator writes.
ACTOR_CONFIG_SECONDS = 300.0
# After SIGTERM open connections may stay so long once the engine has ended.
CLOSE_SECONDS = 2
EXPERTS_WORKER = "dovetail.rollout.serving.cpu_workers.ExpertsWorker"
STAGE_WORKER = "dovetail.rollout.serving.cpu_workers.StageWorker"
# The share of each GPU's memory for a server beside trainers, unless the plan says more.
COLOCATED_MEMORY = 0.4
MAX_KV_SHARE = 0.25
BATCH_INVARIANT = (8, 0)  # the least compute capability, by vLLM's documentation


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM. Further vLLM arguments may be given. Returns 0. Otherwise it writes a sentence to stderr,
    and returns 2 for a configuration that a restart cannot fix, or 1 for any other failure."""
    try:
        env = ProcessEnv.read()
        job = _job(env)
        group = _group(job, env.group)
        # If there is no GPU, groups that ask for one run on CPUs, as trainers and scorers do.
        capability = None if group.on_cpu else my_capability()
        config = wait_for_config(env.run_dir / ACTOR_CONFIG, ACTOR_CONFIG_SECONDS)
        on_cpu = capability is None
        planned = None if group.on_cpu else planned_server(env.plan_file, group.name)
        # One device has no stages. If a GPU group runs on CPUs, each of its stages is a process.
        pp = planned.pp if planned is not None and group.gpu.per_pod > 1 else 1
        stages, ranks = degrees([*group.vllm_args, *(argv or [])], group, on_cpu, pp)
        memory = None if on_cpu or planned is None else planned.memory
        dtype = serving_dtype(group.dtype, job.spec.models.actor.dtype, capability).value
        plan = ServerPlan(env, job, group, config, on_cpu, dtype, stages, ranks, memory, tuple(argv or ()))
        backend = load_backend(os.environ, VLLM)
        if problem := backend.problem(plan):
            raise ValueError(problem)
    except (OSError, ValueError) as error:
        print(f"dovetail rollout server: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return backend.serve(plan)


class VLLM:
    """Dovetail's own backend: vLLM."""

    def problem(self, plan: ServerPlan) -> str | None:
        """Says why vLLM cannot serve the plan: a version that the plug-ins do not work with, a build or sizes of
        attention heads that are not for CPUs, a GPU that is too old for what is asked, or arguments with which it
        would serve another model."""
        found = installed()
        if found is not None and (problem := version_problem(found[1])):
            return problem
        if found is not None and plan.on_cpu and (problem := build_problem(*found)):
            return problem
        capability = my_capability() if plan.job.spec.generation.batch_invariant and not plan.on_cpu else None
        if capability is not None and capability < BATCH_INVARIANT:
            return (
                f"spec.generation.batchInvariant needs GPUs of compute capability {show(BATCH_INVARIANT)}, and this "
                f"server's has {show(capability)}; set it to false, or give the group another gpu.product"
            )
        if plan.job.spec.ppo.routing_replay and (error := replay_error(plan.config)):
            return error
        if problem := served_problem(plan.config, [*plan.group.vllm_args, *plan.arguments]):
            return f"vllmArgs of group {plan.group.name}: {problem}"
        return cpu_head_error(plan.config) if plan.on_cpu else None

    def serve(self, plan: ServerPlan) -> int:
        """Run vLLM's API server in this process."""
        env, job, group, config, on_cpu = plan.env, plan.job, plan.group, plan.config, plan.on_cpu
        os.environ.update(environment(on_cpu, os.environ, job.spec.generation.batch_invariant))
        os.environ[SERVED_TEMPERATURE] = repr(served_temperature(job.spec))
        arguments = vllm_arguments(env, job, group, config, on_cpu, plan.dtype, plan.stages, plan.memory)
        arguments += plan.arguments
        experts = returns_experts(job, plan.stages)
        # A stage has only the KV cache of its own layers, and the connectors do not tell stages apart. A server does
        # not know the experts of tokens whose keys and values come from another server.
        kv = kv_setup(env, config, on_cpu, plan.dtype, plan.ranks) if plan.stages == 1 and not experts else None
        if kv is not None:
            os.environ.update(kv.environment)
            arguments = [*kv.arguments, *arguments]
        return serve(arguments, env, on_cpu, kv, experts)


def _job(env: ProcessEnv) -> RLHFJob:
    """The job. If its manifest says Auto for the lag, it gets the plan's lag."""
    job = RLHFJob.model_validate_json(env.job_file.read_text())
    if job.spec.ppo.lag != AUTO_LAG:
        return job
    plan = Plan.model_validate_json(env.plan_file.read_text())
    return job.model_copy(update={"spec": with_lag(job.spec, plan.lag)})


def _group(job: RLHFJob, name: str) -> Group:
    groups = {g.name: g for g in job.spec.groups}
    if name not in groups:
        raise ValueError(f"DOVETAIL_GROUP is {name!r}; the job has the groups {', '.join(groups)}")
    return groups[name]


def wait_for_config(
    folder: Path,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The config.json of `folder`, once it exists and is complete. Raises TimeoutError after `seconds`."""
    end = clock() + seconds
    path = folder / "config.json"
    while True:
        try:
            config = json.loads(path.read_text())
            if isinstance(config, dict):
                return dict(text_part(config))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            pass
        if clock() >= end:
            raise TimeoutError(f"{path} did not appear within {seconds:g} s; the coordinator writes it first of all")
        sleep(0.05)


def environment(on_cpu: bool, given: Mapping[str, str], batch_invariant: bool = False) -> dict[str, str]:
    """The variables to set for vLLM. Variables that the user has set in `given` stay, except those that the plug-ins
    depend on. `batch_invariant`: on GPUs with vLLM's kernels of that name."""
    from dovetail.rollout.serving.preload import CPU_ENVIRONMENT

    must = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "dovetail,dovetail_info", "VLLM_NO_USAGE_STATS": "1"}
    must["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(SERVER_KEEP_SECONDS)
    if given.get(PULSE):
        # vLLM leaves its sockets behind when it is killed. This folder is removed after the run, and its path is short.
        must["VLLM_RPC_BASE_PATH"] = os.path.dirname(given[PULSE])
    may: dict[str, str] = {}
    if on_cpu:
        # The worker runs inside the engine core, which saves a process and its imports.
        must["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        may = dict(CPU_ENVIRONMENT)
    else:
        # A forked process cannot use CUDA if this one has, whichever library it was.
        must["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if batch_invariant:
            must["VLLM_BATCH_INVARIANT"] = "1"
    return must | {key: value for key, value in may.items() if key not in given}


def planned_server(plan_file: Path, group: str) -> Rollout | None:
    """The plan of the group's first server. A server that is not in the plan is like it. Raises OSError and
    ValueError."""
    plan = Plan.model_validate_json(plan_file.read_text())
    return next((rollout for rollout in plan.rollouts if rollout.group == group), None)


def degrees(given: Sequence[str], group: Group, on_cpu: bool, planned: int) -> tuple[int, int]:
    """The numbers of pipeline stages and tensor-parallel ranks of a server with these arguments for vLLM, read as vLLM
    reads them. If the arguments do not say it, stages are as planned, and on GPUs the ranks are the rest of the pod's
    GPUs. Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("-pp", "--pipeline-parallel-size", dest="stages", type=int, default=planned)
    parser.add_argument("-tp", "--tensor-parallel-size", dest="ranks", type=int)
    names = [argument.partition("=") for argument in given]
    try:
        found, _ = parser.parse_known_args([name.replace("_", "-") + sign + rest for name, sign, rest in names])
    except argparse.ArgumentError as error:
        raise ValueError(f"vLLM's arguments of group {group.name}: {error}") from None
    stages = max(1, found.stages)
    return stages, max(1, found.ranks or (1 if on_cpu else group.gpu.per_pod // stages))


def vllm_arguments(
    env: ProcessEnv,
    job: RLHFJob,
    group: Group,
    config: Mapping[str, Any],
    on_cpu: bool,
    dtype: str,
    stages: int = 1,
    memory: float | None = None,
) -> list[str]:
    """The command line of vLLM's API server. The group's own `vllmArgs` come last and win. `memory`: the share of each
    GPU's memory."""
    spec = job.spec
    length = max_model_len(job, config)
    tokenizer = env.run_dir / "tokenizer"
    arguments = [
        *("--model", str(env.run_dir / ACTOR_CONFIG)),
        *("--served-model-name", "actor"),
        *("--load-format", "dummy"),
        *("--host", env.host),
        *("--port", str(env.port)),
        *("--dtype", dtype),
        *("--max-model-len", str(length)),
        *("--max-num-seqs", str(spec.generation.max_concurrent)),
        *("--weight-transfer-config", json.dumps({"backend": "dovetail"})),
        *("--worker-extension-cls", SENDING_WORKER if relays_weights(spec, group) else WEIGHTS_WORKER),
        *("--middleware", "dovetail.rollout.serving.token_check.Guard"),
        *("--shutdown-timeout", "0"),
        *("--generation-config", "vllm"),
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    ]
    if tokenizer.is_dir():
        # vLLM needs the tokenizer for stop strings, and finds the end token there.
        arguments += ["--tokenizer", str(tokenizer)]
    else:
        arguments += ["--skip-tokenizer-init"]
    if on_cpu:
        arguments += [
            "--enforce-eager",
            *("--logits-processors", COUNTER_SAMPLER),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes(config, length, spec.generation.max_concurrent, stages))),
        ]
        if stages > 1:
            arguments += ["--worker-cls", STAGE_WORKER]
        elif returns_experts(job, stages):
            arguments += ["--worker-cls", EXPERTS_WORKER]
    if returns_experts(job, stages):
        arguments += ["--enable-return-routed-experts"]
    if stages > 1:
        arguments += ["--pipeline-parallel-size", str(stages)]
    if not on_cpu:
        if group.gpu.per_pod > stages:
            arguments += ["--tensor-parallel-size", str(group.gpu.per_pod // stages)]
        if Role.TRAINER in group.roles:
            # The server leaves its GPUs to the trainers while they train. (vLLM cannot sleep on CPUs, so there it only
            # idles.)
            arguments += [SLEEP]
            # The trainers keep weights and optimizer state on the GPUs all the time.
            memory = COLOCATED_MEMORY if memory is None else memory
        if memory is not None:
            arguments += ["--gpu-memory-utilization", f"{memory:g}"]
    if spec.models.actor.trust_remote_code:
        arguments += ["--trust-remote-code"]
    return [*arguments, *group.vllm_args]


def returns_experts(job: RLHFJob, stages: int) -> bool:
    """Whether a server with this many pipeline stages reports which experts each token got. vLLM cannot do this with
    several stages."""
    return job.spec.ppo.routing_replay and stages == 1


def max_model_len(job: RLHFJob, config: Mapping[str, Any]) -> int:
    """The tokens of the longest prompt plus the longest response, at most the model's positions."""
    wanted = job.spec.data.max_prompt_tokens + job.spec.generation.max_tokens
    positions = config.get("max_position_embeddings")
    return min(wanted, int(positions)) if positions else wanted


def kv_cache_bytes(config: Mapping[str, Any], length: int, concurrent: int, stages: int = 1) -> int:
    """The bytes of float32 KV cache of each of `stages` for `concurrent` sequences of `length` tokens. All stages
    together get at most a quarter of the machine's memory, but always enough for two sequences."""
    blocks, layers = -(-length // KV_BLOCK_TOKENS), int(config.get("num_hidden_layers", 1))
    share = kv_token_bytes(config, 4) * -(-layers // stages) // layers
    sequence = blocks * KV_BLOCK_TOKENS * share
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # One more block is needed, because vLLM keeps one for itself.
    wanted = concurrent * sequence + sequence // blocks
    return max(min(wanted, int(memory * MAX_KV_SHARE) // stages), 3 * sequence)


def kv_token_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """The bytes of one token's KV cache over all layers."""
    heads = int(config.get("num_attention_heads", 1))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers", 1))
    return layers * kv_heads * (head_size(config) or 64) * 2 * item_bytes


def kv_setup(env: ProcessEnv, config: Mapping[str, Any], on_cpu: bool, dtype: str, ranks: int) -> KVSetup | None:
    """The KV transfer of this server with `ranks` tensor-parallel ranks. It is None for models with several kinds of
    layers, because vLLM lays out their caches by kind only without such a connector, and for models of which
    transformers' body computes a stage. It is also None for models with
    windows, because vLLM frees the blocks behind a window, and moves of the rest are not tested."""
    family = family_of(config)
    if len(set(config.get("layer_types") or ())) > 1 or (
        family is not None and (family.kinds or family.windowed(config))
    ):
        return None
    item_bytes = 4 if dtype == "float32" else 2
    return prepare(env.host, on_cpu, ranks, f"{dtype} x {ranks}", kv_token_bytes(config, item_bytes))


def serve(arguments: list[str], env: ProcessEnv, on_cpu: bool, kv: KVSetup | None = None, experts: bool = False) -> int:
    """Run vLLM's API server in this process. Works in a child of a forkserver that has called `preload`."""
    import psutil
    import uvloop
    import vllm
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from dovetail.protocol.process.endings import die_with_parent
    from dovetail.rollout.compat import (
        allow_experts_on_cpus,
        fork_engine_core,
        inspect_models_here,
        parse_serve_arguments,
        run_server,
    )
    from dovetail.rollout.serving.model_infos import use_brought
    from dovetail.rollout.serving.register import Registrar
    from dovetail.rollout.serving.routes import STATE, UnsuitableRunner

    # This is vLLM's default protocol with a deadline for headers.
    http = type("Http", (HeaderDeadline, AutoHTTPProtocol), {})
    STATE.name = env.name
    STATE.incarnation = uuid.uuid4().hex
    STATE.vllm_version = vllm.__version__
    if kv is not None:
        STATE.kv = kv.ability
    if on_cpu:
        fork_engine_core()
        inspect_models_here()
        if experts:
            allow_experts_on_cpus()
    else:
        use_brought()
    # A forked engine core has loaded its plug-ins already, so it does not call `register`.
    os.register_at_fork(after_in_child=die_with_parent)

    args = parse_serve_arguments(arguments, "dovetail rollout server")
    STATE.max_model_len = int(args.max_model_len)
    STATE.sleep = bool(args.enable_sleep_mode)
    registrar = Registrar(env, STATE)
    registrar.start()
    try:
        uvloop.run(run_server(args, http, CLOSE_SECONDS))
    except UnsuitableRunner as error:
        print(f"dovetail rollout server: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass  # SIGTERM came before the server was up
    except psutil.NoSuchProcess:
        pass  # at its end vLLM looks for processes on its port, and finds its own forked workers, which are just ending
    finally:
        registrar.stop()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; it sends SIGTERM
    sys.exit(main(sys.argv[1:]))
