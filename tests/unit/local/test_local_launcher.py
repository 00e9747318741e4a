"""Rendering processes, the run directory, ports, devices and last words."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.coordinator.store.identity import identify, read_id
from dovetail.coordinator.store.manifest_changes import adopt
from dovetail.coordinator.store.store import Store
from dovetail.gpus.nvidia_driver import cuda_devices
from dovetail.launch.local.launcher import Launcher, Stopwatch, spawn_kind
from dovetail.launch.local.rundir import RunDir, explained
from dovetail.launch.ports import PortReservation
from dovetail.launch.processes import port_names, render
from dovetail.launch.spawn import ForkSpawner
from dovetail.manifest.types import Parallelism, RLHFJob
from dovetail.protocol.errors import RunError, UsageError
from dovetail.protocol.plan import Batching, Plan, Rollout, TaskPlacement, TrainerRank
from dovetail.protocol.process.endings import why_ended
from dovetail.protocol.process.env import ProcessEnv
from dovetail.protocol.process.inheritance import take_environment
from dovetail.rollout.serving.preload import SERVING, TRAINING
from helpers.patience import PATIENCE


def a_job(groups, **spec):
    return RLHFJob.model_validate(
        {
            "apiVersion": "dovetail.dev/v1beta1",
            "kind": "RLHFJob",
            "metadata": {"name": "demo"},
            "spec": {
                "models": {"actor": {"source": {"scratch": {}}}},
                "data": {
                    "demonstrations": [{"synthetic": {}}],
                    "preferences": [{"synthetic": {}}],
                    "prompts": [{"synthetic": {}}],
                },
                "groups": groups,
                **spec,
            },
        }
    )


def a_plan(trainers, rollouts):
    return Plan(
        world_size=len(trainers),
        parallelism={"actor": Parallelism(dp=len(trainers))},
        batching=[Batching(stage="sft", model="actor", mini_batch_size=4, micro_batch_size=2, micro_batches=1)],
        tasks=[TaskPlacement(task="sft", groups=["cpu"])],
        trainers=[TrainerRank(name=f"trainer-{i}", rank=i, group=g) for i, g in enumerate(trainers)],
        rollouts=[Rollout(name=name, group=group) for name, group in rollouts],
    )


CPU = [{"name": "train", "roles": ["trainer"], "replicas": 2}, {"name": "gen", "roles": ["rollout"], "replicas": 2}]
CPU_PLAN = a_plan(["train", "train"], [("gen-0", "gen"), ("gen-1", "gen")])


def rendered(job, plan, **more):
    ports = {name: 20_000 + i for i, name in enumerate(port_names(plan))}
    return {s.name: s for s in render(job, plan, Path("/runs/x"), ports, "secret", **more)}


def test_processes_names_modules_and_logs():
    specs = rendered(a_job(CPU), CPU_PLAN)
    assert [(s.name, s.module) for s in specs.values()] == [
        ("coordinator", "dovetail.coordinator.main"),
        ("trainer-0", "dovetail.trainer.main"),
        ("trainer-1", "dovetail.trainer.main"),
        ("gen-0", "dovetail.rollout.serving.vllm_server"),
        ("gen-0-scorer", "dovetail.rollout.scoring.scorer"),
        ("gen-1", "dovetail.rollout.serving.vllm_server"),
        ("gen-1-scorer", "dovetail.rollout.scoring.scorer"),
    ]
    assert specs["gen-1"].log == Path("/runs/x/logs/gen-1.log")
    assert [name for name, s in specs.items() if not s.shares_imports] == ["coordinator"]


def test_every_process_can_read_its_environment():
    specs = rendered(a_job(CPU), CPU_PLAN, base_env={"PATH": "/bin"}, threads=3)
    envs = {name: ProcessEnv.read(s.env) for name, s in specs.items()}
    assert {e.coordinator for e in envs.values()} == {"http://127.0.0.1:20000"}
    assert {e.token for e in envs.values()} == {"secret"}
    assert {e.run_dir for e in envs.values()} == {Path("/runs/x")}
    assert envs["coordinator"].port == 20000
    assert (envs["trainer-1"].rank, envs["trainer-1"].world_size) == (1, 2)
    assert (envs["trainer-1"].port, envs["trainer-1"].metrics_port) == (0, 20002)
    assert (envs["gen-1-scorer"].group, envs["gen-1-scorer"].port) == ("gen", 20006)
    assert specs["gen-0"].env["PATH"] == "/bin"
    assert specs["gen-0"].env["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in specs["gen-0"].env


def test_the_users_thread_count_wins():
    assert rendered(a_job(CPU), CPU_PLAN, base_env={"OMP_NUM_THREADS": "7"})["gen-0"].env["OMP_NUM_THREADS"] == "7"


def test_a_server_has_a_port_of_its_own_for_its_inside():
    specs = rendered(a_job(CPU), CPU_PLAN)
    inside = {name: spec.env["VLLM_PORT"] for name, spec in specs.items() if "VLLM_PORT" in spec.env}
    assert inside.keys() == {"gen-0", "gen-1"}
    assert len(set(inside.values())) == 2
    assert not set(inside.values()) & {spec.env["DOVETAIL_PORT"] for spec in specs.values()}


def test_a_job_inherits_nothing_that_would_change_how_its_processes_meet():
    """Of another launcher, of a user's own vLLM server, of another machine."""
    foreign = {
        **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"), "1"),
        **dict.fromkeys(("VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_PLUGINS", "VLLM_LOGGING_LEVEL"), "x"),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "nosuch0"),
        **dict.fromkeys(("NCCL_COMM_ID", "GLOO_DEVICE_TRANSPORT", "TORCH_NCCL_BLOCKING_WAIT", "USE_LIBUV"), "1"),
        **dict.fromkeys(("DOVETAIL_CONFIG_DIR", "DOVETAIL_SURPLUS", "ACCELERATE_USE_FSDP"), "1"),
    }
    for spec in rendered(a_job(CPU), CPU_PLAN, base_env=foreign, threads=3).values():
        mine = {name: spec.env[name] for name in foreign.keys() & spec.env.keys()}
        mine.pop("VLLM_PORT", None)
        assert mine == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
        assert spec.env.get("VLLM_PORT") != "x"
    users = {
        "PATH": "/bin",
        "PYTHONPATH": "/p",
        "HF_TOKEN": "h",
        "HF_HOME": "/h",
        "OPENAI_API_KEY": "o",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_DISABLE": "1",
        "VLLM_CACHE_ROOT": "/c",
        "DOVETAIL_DEBUG": "trainer-0",
        "OMP_PROC_BIND": "true",
        "TORCH_LOGS": "+dynamo",
    }
    assert users.items() <= rendered(a_job(CPU), CPU_PLAN, base_env=users)["trainer-0"].env.items()


@pytest.mark.parametrize("given", ["", "auto", "0", "4,2", "-1"])
def test_a_thread_count_that_is_no_number_is_not_inherited(given):
    env = rendered(a_job(CPU), CPU_PLAN, base_env={"OMP_NUM_THREADS": given}, threads=3)["trainer-0"].env
    assert env["OMP_NUM_THREADS"] == "3"


def test_a_forked_process_keeps_what_the_imports_set_for_mkl_unless_it_is_given():
    """`dovetail.models.layers.packing` sets it where it is imported, which is before the fork."""
    for given, kept in (({}, "AVX2,STRICT"), ({"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE")):
        environ = {"MKL_CBWR": "AVX2,STRICT", "OF_THE_ZYGOTE": "1"}
        take_environment(environ, {"HOME": "/", **given})
        assert environ == {"MKL_CBWR": kept, "HOME": "/"}


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_stays_for_the_internet_and_is_not_asked_for_this_machine(proxy):
    def direct(**given: str) -> str:
        env = rendered(a_job(CPU), CPU_PLAN, base_env={proxy: "http://p:1", **given})["coordinator"].env
        assert env[proxy] == "http://p:1"
        assert env["no_proxy"] == env["NO_PROXY"]
        return env["no_proxy"]

    assert direct() == "127.0.0.1,localhost,::1"
    assert direct(NO_PROXY="a.b, c") == "a.b,c,127.0.0.1,localhost,::1"
    assert direct(no_proxy="*") == "*"
    assert "no_proxy" not in rendered(a_job(CPU), CPU_PLAN, base_env={})["coordinator"].env


def test_the_secret_is_not_in_the_repr():
    assert "secret" not in repr(rendered(a_job(CPU), CPU_PLAN)["gen-0"])


def test_gpus_are_dealt_out_by_group():
    groups = [
        {"name": "train", "roles": ["trainer"], "replicas": 1, "gpu": {"product": "X", "perPod": 2}},
        {"name": "gen", "roles": ["rollout"], "replicas": 2, "gpu": {"product": "X", "perPod": 2}},
        {"name": "slow", "roles": ["rollout"]},
    ]
    plan = a_plan(["train", "train"], [("gen-0", "gen"), ("gen-1", "gen"), ("slow-0", "slow")])
    seen = {
        n: s.env["CUDA_VISIBLE_DEVICES"]
        for n, s in rendered(a_job(groups), plan, devices=["0", "1", "2", "3", "4"]).items()
    }
    assert seen == {
        "coordinator": "",
        "trainer-0": "0",
        "trainer-1": "1",
        "gen-0": "2,3",
        "gen-0-scorer": "2,3",
        "gen-1": "4,0",  # five GPUs, so it begins again
        "gen-1-scorer": "4,0",
        "slow-0": "",
        "slow-0-scorer": "",
    }


def test_a_group_with_both_roles_shares_its_gpus():
    groups = [{"name": "both", "roles": ["trainer", "rollout"], "replicas": 2, "gpu": {"product": "X", "perPod": 1}}]
    plan = a_plan(["both", "both"], [("both-0", "both"), ("both-1", "both")])
    specs = rendered(a_job(groups), plan, devices=["a", "b"])
    assert specs["trainer-1"].env["CUDA_VISIBLE_DEVICES"] == specs["both-1"].env["CUDA_VISIBLE_DEVICES"] == "b"


def test_ports_differ_are_free_and_are_not_given_twice():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first, second = PortReservation(), PortReservation()
        a, b = first.reserve(f"p{i}" for i in range(40)), second.reserve(f"p{i}" for i in range(40))
        ports = [*a.values(), *b.values()]
        assert len(set(ports)) == 80
        assert taken.getsockname()[1] not in ports
        for port in ports[:5]:
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        first.close()
        second.close()


def test_devices(tmp_path):
    assert cuda_devices({}, tmp_path) == []
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert cuda_devices({}, tmp_path) == ["0", "1"]
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["1"]
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ["0"]


def test_spawn_kind():
    assert spawn_kind({}, []) == "fork"
    assert spawn_kind({}, ["0"]) == "exec"
    assert spawn_kind({"DOVETAIL_SPAWN": "exec"}, []) == "exec"
    with pytest.raises(RunError, match="DOVETAIL_SPAWN is 'thread'"):
        spawn_kind({"DOVETAIL_SPAWN": "thread"}, [])


def started(path, job=None):
    run = RunDir(path)
    run.open()
    run.write_job(job or a_job(CPU), CPU_PLAN, resume=False)
    return run


def test_a_run_directory_is_locked_and_not_used_twice(tmp_path):
    run = started(tmp_path / "r")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match="another dovetail run is using"):
            RunDir(tmp_path / "r").open(**options)
    run.close()
    with pytest.raises(UsageError, match="--resume"):
        RunDir(tmp_path / "r").open()
    again = RunDir(tmp_path / "r")
    again.open(resume=True)
    again.close()


def content(folder):
    """Everything below a folder: the bytes of files, and where links point. Links are not followed."""
    return {
        path.relative_to(folder).as_posix(): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def a_whole_run(path):
    """A run that has made a file of each kind, and its files."""
    run = started(path)
    run.token()
    store, run_id = Store(run.path), read_id(run.path)
    identify(run.path, store)
    store.close()
    model = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "README.md",
        "tokenizer.json",
        "value_head/model.safetensors",
    ]
    files = [
        *("hub.json", "summary.json", "report.html", "schedule.json", "schedule-sft.json", "events.jsonl"),
        *(
            "history.jsonl",
            "elapsed.json",
            "tokenizer/tokenizer.json",
            "tokenizer/prepared.txt",
            "models/actor-config/config.json",
        ),
        *("experience/000003.safetensors", "samples/iteration-000001.jsonl", "samples/evaluation-before-sft.jsonl"),
        *("logs/gen-0-scorer.log", "traces/iteration-0001.json", "tensorboard/events.out.tfevents.1.host.7.0"),
        *("trackers/wandb.json", "trackers/wandb/run-1/files/x.txt", "summary.json.tmp", ".reserve"),
        *(
            f"{folder}/{name}"
            for folder in ("models/actor", "models/sft", "set-aside/4", "models/reward.tmp")
            for name in model
        ),
        *(f"checkpoints/{name}/__0_0.distcp" for name in ("ppo-000004", "ppo-000008.tmp", "sft-000003.old")),
        "checkpoints/ppo-000004/.metadata",
        "cache/datasets/json/default-1/0.0.0/x.arrow",
    ]
    for name in files:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("of the run")
    for folder in ("models/actor", "models/sft", "set-aside/4"):
        (run.path / folder / "dovetail.json").write_text(json.dumps({"run": run_id}))
    (run.path / "checkpoints/ppo-000004/state.json").write_text(json.dumps({"run": run_id}))
    run.close()
    return run


def test_overwrite_removes_all_of_the_earlier_run_and_nothing_else(tmp_path):
    """With --run-dir . the run's folder is the user's project."""
    names = [".git/config", "job.yaml", "notes.md", "data/prompts.jsonl", "rewards.py", "checkpoint/x", "run.json.bak"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"my {name}")
    (tmp_path / "elsewhere").symlink_to("data")
    before = content(tmp_path)
    run = a_whole_run(tmp_path)
    first = read_id(tmp_path)
    with pytest.raises(UsageError, match=r"replace it with --overwrite \(other files stay\)"):
        run.open()
    run.open(overwrite=True)
    assert content(tmp_path) == before | {".lock": b""}
    run.write_job(a_job(CPU), CPU_PLAN, resume=False)
    run.close()
    assert read_id(tmp_path) != first


def places(run):
    """Where a user may have put a file in a run's folder: beside each file of the run, but not among wandb's."""
    return sorted(
        {path.parent for path in run.path.rglob("*") if "run-1" not in path.parts}
        | {run.path / "models" / "mine", run.path / "hub" / "mine"}
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_command_takes_a_foreign_file_from_a_run(tmp_path, seed):
    """Files with names and places drawn at random, around a run and within its folders. Overwriting keeps each, whether
    it is done or refused; if it is refused, the run is whole too."""
    draw = random.Random(seed)
    run = a_whole_run(tmp_path / "r")
    known, foreign = content(run.path), {}
    for _ in range(draw.randint(1, 3)):
        stem = "".join(draw.choices("abcdefgh-_0123456789", k=draw.randint(1, 9)))
        ending = draw.choice(["", ".txt", ".md", ".yaml", ".json.bak", ".gguf", ".bin", ".py.orig", ".jsonl.old"])
        path = draw.choice(places(run)) / (stem + ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        if draw.random() < 0.2:
            path.symlink_to(tmp_path)
        else:
            path.write_bytes(draw.randbytes(20))
        foreign |= {path.relative_to(run.path).as_posix(): content(run.path)[path.relative_to(run.path).as_posix()]}
    said = ""
    try:
        run.open(overwrite=True)
    except UsageError as error:
        said = str(error)
    run.close()
    assert content(run.path) == foreign | {".lock": b""} | (known if said else {})
    named = [path for name in foreign for path in (run.path / name, (run.path / name).parent) if f"{path} is " in said]
    assert ("nothing was deleted" in said and named) or not said
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["models", "checkpoints", "logs", "models/actor", "store.sqlite", "run.json"])
def test_links_in_a_run_are_not_followed(tmp_path, name):
    run = a_whole_run(tmp_path / "r")
    (run.path / name).rename(tmp_path / "elsewhere")
    (run.path / name).symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path)
    with pytest.raises(UsageError, match=rf"/r/{name} is nothing that run \w+ has made; nothing was deleted"):
        run.open(overwrite=True)
    assert content(tmp_path) == before | {"r/.lock": b""}


@pytest.mark.parametrize("name", ["plan.json", "job.json", "summary.json", "models/mine/config.json", "logs/app.log"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_files_with_names_of_a_runs_are_no_run(tmp_path, name, options):
    """Before, a plan.json was enough for --overwrite to empty the folder."""
    for mine in (name, "precious.txt"):
        (tmp_path / mine).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mine).write_text("mine")
    with pytest.raises(UsageError, match=rf"has {name.split('/')[0]}, which a run would write .*: ?|move them away"):
        RunDir(tmp_path).open(**options)
    assert {key: value for key, value in content(tmp_path).items() if value} == {name: b"mine", "precious.txt": b"mine"}


@pytest.mark.parametrize("text", ["{}", '{"id": null}', "my notes"])
@pytest.mark.parametrize("name", ["run.json", "store.sqlite"])
def test_a_record_of_something_else_is_no_run(tmp_path, name, text):
    for mine in (name, "precious.txt"):
        (tmp_path / mine).write_text(text)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UsageError, match=rf"{name.replace('.', '[.]')} is of no run of Dovetail"):
            RunDir(tmp_path).open(**options)
    assert content(tmp_path) == {name: text.encode(), "precious.txt": text.encode()}


def test_a_file_called_deleting_deletes_nothing(tmp_path):
    run = a_whole_run(tmp_path / "r")
    (run.path / ".deleting").touch()
    before = content(run.path)
    run.open(resume=True)
    run.close()
    assert content(run.path) == before | {".lock": b""}


def test_an_interrupted_overwrite_goes_on_only_when_asked(tmp_path, monkeypatch):
    """Killed after any number of deletions: the rest is not resumed, and is deleted by the next --overwrite."""
    total = len(content(a_whole_run(tmp_path / "r").path))
    for deletions in range(0, total - 2, 5):
        run = a_whole_run(tmp_path / f"r{deletions}")
        (run.path / "mine.txt").write_text("mine")
        left = [deletions]

        def unlink(path, *args, left=left, real=Path.unlink, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                run.open(overwrite=True)
        run.close()
        half = content(run.path)
        for options in ({"resume": True}, {}):
            with pytest.raises(UsageError, match=r"no run to resume in .* give --overwrite to delete the rest"):
                run.open(**options)
        assert content(run.path) == half
        run.open(overwrite=True)
        run.close()
        assert content(run.path) == {".lock": b"", "mine.txt": b"mine"}


def test_a_lost_plan_or_manifest_is_made_again_on_resume(tmp_path):
    for name in ("plan.json", "job.json"):
        run = started(tmp_path / name)
        (run.path / "store.sqlite").touch()
        run.close()
        (run.path / name).unlink()
        with pytest.raises(UsageError, match="continue it with --resume"):
            run.open()
        run.open(resume=True)
        run.write_job(a_job(CPU), CPU_PLAN, resume=True)
        assert RLHFJob.model_validate_json((run.path / "job.json").read_text()) == a_job(CPU)
        assert (run.path / "plan.json").exists()
        run.close()


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("options", [{}, {"resume": True}])
def test_results_without_their_store_are_refused(tmp_path, options, empty):
    run = started(tmp_path / "r")
    (run.path / "checkpoints" / "ppo-000004").mkdir(parents=True)
    if empty:
        (run.path / "store.sqlite").touch()
    run.close()
    with pytest.raises(UsageError, match=r"has checkpoints/ of an .* run, but its store\.sqlite is missing or empty"):
        run.open(**options)
    run.open(overwrite=True)
    assert not (run.path / "checkpoints").exists()
    run.close()


def test_resuming_nothing(tmp_path):
    with pytest.raises(UsageError, match="no run to resume"):
        RunDir(tmp_path / "r").open(resume=True)
    assert not (tmp_path / "r").exists()


def test_resuming_with_another_manifest_names_the_field(tmp_path):
    run = started(tmp_path / "r")
    with pytest.raises(UsageError, match=r"spec\.ppo\.globalBatchSize may not change from .* stored batches have this"):
        run.write_job(a_job(CPU, ppo={"globalBatchSize": 128}), CPU_PLAN, resume=True)
    assert json.loads((run.path / "job.json").read_text())["spec"]["ppo"]["globalBatchSize"] != 128
    run.write_job(a_job(CPU, failurePolicy={"maxRestarts": 1}, ppo={"iterations": 77}), CPU_PLAN, resume=True)
    assert json.loads((run.path / "job.json").read_text())["spec"]["ppo"]["iterations"] == 77
    run.close()


def test_a_run_goes_on_with_the_newer_version_of_the_api(tmp_path):
    run = started(tmp_path / "r", a_job(CPU).model_copy(update={"api_version": "dovetail.dev/v1alpha1"}))
    run.write_job(a_job(CPU), CPU_PLAN, resume=True)
    assert json.loads((run.path / "job.json").read_text())["apiVersion"] == "dovetail.dev/v1beta1"
    run.close()


def test_resuming_asks_the_store_too(tmp_path):
    """job.json is lost: what the run was begun with, and how far it is, is in the store."""
    run = started(tmp_path / "r")
    (run.path / "job.json").unlink()
    store = Store(run.path)
    adopt(a_job(CPU).spec, store, lambda *_, **__: None)
    store.put("ppo/progress", {"step": 5, "kl_coef": 0.1})
    store.close()
    with pytest.raises(UsageError, match=r"cannot resume .*: spec\.seed may not change from 0 to 9"):
        run.write_job(a_job(CPU, seed=9), CPU_PLAN, resume=True)
    with pytest.raises(UsageError, match=r"spec\.ppo\.iterations is 3, but the run has done 5"):
        run.write_job(a_job(CPU, ppo={"iterations": 3}), CPU_PLAN, resume=True)
    run.write_job(a_job(CPU, ppo={"iterations": 6}), CPU_PLAN, resume=True)
    run.close()


def test_resuming_a_run_of_an_earlier_release_records_what_it_does_otherwise(tmp_path):
    """Its store does not know the manifest, and its job.json holds that release's defaults."""
    run = started(tmp_path / "r")
    grpo = a_job(CPU, ppo={"advantage": "grpo", "samplesPerPrompt": 4})
    document = grpo.model_dump(mode="json", by_alias=True)
    document["spec"]["ppo"]["kl"] = {"coef": 0.05, "target": None, "horizon": 10_000, "estimator": "k1"}
    document["spec"]["ppo"]["streaming"] = "Auto"
    (run.path / "job.json").write_text(json.dumps(document))
    Store(run.path).close()
    told = run.write_job(grpo, CPU_PLAN, resume=True)
    assert "goes on without spec.ppo.streaming" in told
    assert "spec.ppo.lag" in told
    run.close()
    store, events = Store(run.path), []
    adopt(
        grpo.spec, store, lambda event, **fields: events.append((event, fields["field"], fields["old"], fields["new"]))
    )
    store.close()
    assert events == [
        ("run.changed", "spec.ppo.kl.estimator", "k1", "Auto"),
        ("run.changed", "spec.ppo.kl.in", "Reward", "Auto"),
        ("run.changed", "spec.ppo.streaming", "Auto", None),
    ]


def test_job_and_plan_read_back(tmp_path):
    run = started(tmp_path / "r")
    assert RLHFJob.model_validate_json((run.path / "job.json").read_text()) == a_job(CPU)
    assert Plan.model_validate_json((run.path / "plan.json").read_text()) == CPU_PLAN
    run.close()


def test_token_is_kept_and_private(tmp_path):
    run = started(tmp_path / "r")
    token = run.token()
    assert len(token) >= 32
    assert run.token() == token
    assert stat.S_IMODE((run.path / "token").stat().st_mode) == 0o600
    run.close()


def test_a_full_disk_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match=r"disk that holds .* is full"), explained(tmp_path):
        raise OSError(28, "No space left on device")


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="not a directory; choose another with --run-dir"):
        RunDir(tmp_path / "file" / "r").open()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("one\ntwo\n\n", "two"),
        (
            "Traceback (most recent call last):\n  File x\nValueError: no such layer\ncleaning up\n",
            "ValueError: no such layer",
        ),
        ("\x1b[31mERROR\x1b[0m 12:00 torch.OutOfMemoryError: 3 GiB\nbye\n", "torch.OutOfMemoryError: 3 GiB"),
        ("DeprecationWarning: old\nlast words\n", "last words"),
    ],
)
def test_a_log_tells_why_its_process_ended(tmp_path, text, expected):
    (tmp_path / "log").write_text("ValueError: an earlier life\n" + text)
    assert why_ended(tmp_path / "log", start=len("ValueError: an earlier life\n")) == expected


def test_no_log_tells_nothing(tmp_path):
    assert why_ended(tmp_path / "none") is None


def test_the_stopwatch_goes_on_in_the_next_run(tmp_path):
    now = [100.0]
    first = Stopwatch(tmp_path / "elapsed.json", lambda: now[0])
    now[0] += 7.0
    first.look()
    now[0] += 1.0  # lost: the launcher was killed
    again = Stopwatch(tmp_path / "elapsed.json", lambda: now[0])
    now[0] += 2.0
    assert again.seconds == 9.0
    (tmp_path / "elapsed.json").write_text("{")
    assert Stopwatch(tmp_path / "elapsed.json", lambda: now[0]).seconds == 0.0


def test_processes_read_files_as_utf_8_in_any_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUTF8", "0")
    launcher = Launcher(a_job(CPU), CPU_PLAN, tmp_path / "run")
    with launcher:
        assert launcher.specs
        assert {spec.env["PYTHONUTF8"] for spec in launcher.specs} == {"1"}


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [CPU_PLAN.rollouts, []], ids=["with rollouts", "without"])
def test_only_a_job_with_rollouts_waits_for_vllm(tmp_path, monkeypatch, rollouts):
    made = []

    class Noted(ForkSpawner):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setenv("DOVETAIL_SPAWN", "fork")
    monkeypatch.setattr("dovetail.launch.local.launcher.ForkSpawner", Noted)
    plan = CPU_PLAN.model_copy(update={"rollouts": rollouts})
    with Launcher(a_job(CPU), plan, tmp_path / "run"):
        [forker] = made
    module, _, function = forker.preload.partition(":")
    program = f"import sys, {module}; {module}.{function}(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    imported = set(done.stdout.split())
    assert {*TRAINING, *(SERVING if rollouts else ())} <= imported, "a name that nothing has any more is skipped"
    assert ("vllm" in imported) == bool(rollouts)


def watched(run_dir, on_step):
    """Run a job whose processes others start, until something ends it. `on_step` gets the number of the step."""
    everyone = {"coordinator", "trainer-0", "trainer-1", "gen-0", "gen-0-scorer", "gen-1", "gen-1-scorer"}
    steps = iter(range(1000))
    with Launcher(a_job(CPU), CPU_PLAN, run_dir, exclude=everyone) as launcher:
        assert launcher.specs == []
        return launcher.run(lambda: on_step(next(steps)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_stop_leaves_a_summary(tmp_path, number):
    def own(*_):
        raise AssertionError("the signal came when nothing was running")

    before = signal.signal(number, own)  # the tests themselves may run under nohup
    try:
        outcome = watched(tmp_path / "run", lambda step: os.kill(os.getpid(), number))
        assert outcome.interrupted
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "interrupted"
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_a_run_under_nohup_goes_on(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        seen = []

        def on_step(step):
            seen.append(step)
            os.kill(os.getpid(), signal.SIGTERM if step == 2 else signal.SIGHUP)

        assert watched(tmp_path / "run", on_step).interrupted
        assert seen == [0, 1, 2]
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (OSError(errno.EIO, "Input/output error"), "interrupted"),
        (BrokenPipeError(errno.EPIPE, "pipe"), "interrupted"),
        (ZeroDivisionError("division by zero"), "failed"),
    ],
)
def test_a_launcher_that_cannot_show_the_progress_leaves_a_summary(tmp_path, error, state):
    """As of a terminal that was closed, or of `dovetail run job.yaml | head`."""

    def on_step(step):
        raise error

    with pytest.raises(type(error)):
        watched(tmp_path / "run", on_step)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == state


def test_a_run_whose_folder_is_moved_ends_with_a_sentence(tmp_path):
    run, elsewhere = tmp_path / "a" / "run", tmp_path / "b"
    outcome = watched(run, lambda step: (tmp_path / "a").rename(elsewhere) if step == 1 else None)
    assert outcome.reason == (
        f"the run directory {run} was moved to {elsewhere / 'run'} during the run; continue with --run-dir "
        f"{elsewhere / 'run'} --resume"
    )
    assert json.loads((elsewhere / "run" / "summary.json").read_text())["reason"] == outcome.reason
    assert not run.exists(), "nothing is made where the folder was"


@pytest.mark.parametrize("again", [False, True])
def test_a_run_whose_folder_is_deleted_ends_with_a_sentence(tmp_path, again):
    run = tmp_path / "run"

    def on_step(step):
        if step == 1:
            shutil.rmtree(run)
            if again:
                run.mkdir()  # another run of this name begins

    outcome = watched(run, on_step)
    assert outcome.reason == f"the run directory {run} was deleted during the run; start it anew"
    assert not run.exists() or not list(run.iterdir())
