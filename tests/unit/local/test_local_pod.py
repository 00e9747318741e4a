"""A pod's processes: which they are, and how they end together."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from golden import make_objects

from dovetail.launch.liveness import LivenessLimits
from dovetail.launch.processes import ProcessSpec
from dovetail.launch.proctree import snapshot
from dovetail.launch.spawn import ExecSpawner, Exited
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.operator.render.config_map import in_pods
from dovetail.planner.make_plan import make_plan
from dovetail.pod.main import Pod, PodSettings, drain, main, pod_processes
from dovetail.protocol.files.durable import write_json
from dovetail.protocol.process.env import ProcessEnv
from helpers.patience import PATIENCE

SECONDS = 240.0


def a_job(groups):
    document = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text())
    document["spec"]["groups"] = groups
    job = parse(document)
    return job.model_copy(update={"spec": resolve(job.spec)})


def base(tmp_path):
    return ProcessEnv(
        *("demo", "pod", tmp_path, "http://127.0.0.1:1", "secret", "10.0.0.7", 0, 0, "", 0, 1), config_dir=tmp_path
    )


GPU = {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}


def test_trainer_pods_share_the_ranks_of_the_plan(tmp_path):
    job = a_job(
        [
            {"name": "first", "roles": ["trainer"]},
            {"name": "more", "roles": ["trainer"], "gpu": GPU, "replicas": 2},
            {"name": "gen", "roles": ["rollout"]},
        ]
    )
    plan = make_plan(job.spec)
    made = pod_processes(job, plan, job.spec.groups[1], 1, base(tmp_path), ["0", "1"], 3)
    read = [ProcessEnv.read(process.env) for process in made]
    assert [(e.name, e.rank, e.world_size, e.group) for e in read] == [
        ("trainer-3", 3, 5, "more"),
        ("trainer-4", 4, 5, "more"),
    ]
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in made] == ["0", "1"]
    assert len({e.metrics_port for e in read}) == 2
    assert all(e.host == "10.0.0.7" and e.config_dir == tmp_path for e in read)
    with pytest.raises(ValueError, match="no trainer ranks for pod 2"):
        pod_processes(job, plan, job.spec.groups[1], 2, base(tmp_path), [], 1)


def test_a_rollout_pod_shares_its_gpus(tmp_path):
    job = a_job([{"name": "train", "roles": ["trainer"]}, {"name": "gen", "roles": ["rollout"], "gpu": GPU}])
    made = pod_processes(job, make_plan(job.spec), job.spec.groups[1], 7, base(tmp_path), ["0", "1"], 1)
    assert [p.name for p in made] == ["gen-7", "gen-7-scorer"]
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in made] == ["0,1", "0,1"]
    assert len({ProcessEnv.read(p.env).port for p in made}) == 2


# ---------------------------------------------------------------- running


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write small modules for `python -m`."""
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}

    def write(name, code, *, finishes=False):
        (tmp_path / f"{name}.py").write_text(code)
        return ProcessSpec(name, name, {}, finishes=finishes)

    return write, environ


WAIT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(600)
"""


def run(processes, environ, **more):
    pod = Pod(processes, environ, **more)
    return pod.run(), pod.message


def test_the_first_failure_ends_the_pod_with_its_code_and_last_line(modules, capfd):
    write, environ = modules
    code, message = run(
        [write("waits", WAIT), write("fails", "import sys\nprint('no model at /x')\nsys.exit(3)")], environ
    )
    assert code == 3
    assert message == "fails ended (exit code 3): no model at /x"
    assert "no model at /x" in capfd.readouterr().out


def test_all_that_a_process_says_is_copied(modules, capfd):
    """More than a pipe holds."""
    write, environ = modules
    talks = write("talks", "for number in range(20_000):\n    print(f'line {number} of many')", finishes=True)
    assert run([talks], environ) == (0, "")
    assert capfd.readouterr().out.splitlines() == [f"line {number} of many" for number in range(20_000)]


def test_a_killed_process_counts_as_a_signal(modules):
    write, environ = modules
    code, message = run([write("dies", "import os\nos.kill(os.getpid(), 9)")], environ)
    assert code == 128 + signal.SIGKILL
    assert message == "dies ended (signal SIGKILL)"


@pytest.mark.slow
def test_a_process_that_is_stopped_for_good_is_killed(modules):
    write, environ = modules
    stops = write("stops", "import os, signal\nprint('up')\nos.kill(os.getpid(), signal.SIGSTOP)")
    code, message = run([stops], environ, limits=LivenessLimits(1.0, 600.0, 600.0, 600.0))
    assert code == 128 + signal.SIGKILL
    assert re.match(r"stops ended \(killed, as it hung: stopped for \d+ s\)", message)


@pytest.mark.slow
def test_a_process_whose_child_is_stopped_for_good_is_killed_with_it(modules, tmp_path):
    write, environ = modules
    code = "import subprocess, sys, time\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    code += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
    code += "child.send_signal(19)\ntime.sleep(600)"
    code, message = run([write("serves", code)], environ, limits=LivenessLimits(1.0, 600.0, 600.0, 600.0))
    assert code == 128 + signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    assert re.search(rf"its process {child} stopped for \d+ s", message)
    deadline = time.monotonic() + SECONDS
    while any(process.pid == child and not process.zombie for process in snapshot()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_what_a_process_started_in_a_session_of_its_own_ends_with_it(modules, tmp_path):
    write, environ = modules
    code = "import subprocess, sys\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    code += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\nsys.exit(1)"
    assert run([write("dies", code)], environ)[0] == 1
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + SECONDS
    while any(process.pid == child and not process.zombie for process in snapshot()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_process_whose_pulse_stops_is_killed(modules):
    """It lives, and its connections would, too: but nothing is done any more."""
    write, environ = modules
    quiet = (
        "import time\nfrom dovetail.protocol.process.pulse import Pulse\n"
        "time.sleep(0.3)\nPulse.read().beat()\ntime.sleep(600)"
    )
    code, message = run([write("quiet", quiet)], environ, limits=LivenessLimits(10.0, 3.0, 600.0, 600.0))
    assert code == 128 + signal.SIGKILL
    assert message.startswith("quiet ended (killed, as it hung: silent for ")


@pytest.mark.slow
def test_ranks_that_end_with_their_spawner_have_not_finished_and_the_rest_ends_at_once(modules):
    """Somebody ends the spawner, which kills its processes and exits with 0. All of them are lost in one look."""
    write, environ = modules
    trains = write("trains", "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n" + WAIT, finishes=True)
    code, message = run([trains, write("waits", WAIT)], environ, grace=3600.0)
    assert code == 128 + signal.SIGKILL
    assert message.startswith("trains ended (signal SIGKILL of its spawner)")


def test_the_pod_is_done_when_all_that_finish_have(modules):
    write, environ = modules
    first, second = write("one", "print(1)", finishes=True), write("two", "import time\ntime.sleep(0.5)", finishes=True)
    assert run([first, second, write("waits", WAIT)], environ) == (0, "")


def test_a_server_that_ends_by_itself_has_failed(modules):
    write, environ = modules
    code, message = run([write("serves", "print('bye')")], environ)
    assert (code, message) == (1, "serves ended (exit code 0): bye")


COUNTS = """
import pathlib, sys, time
starts = pathlib.Path(__file__).with_suffix(".starts")
with starts.open("a") as file:
    file.write("x")
time.sleep(0.2)
sys.exit({code})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "steady", "starts"),
    [(1, 0.0, 3), (0, 0.0, 3), (1, 60.0, 1), (2, 0.0, 1)],
    ids=["crashed", "ended", "ended soon", "cannot work"],
)
def test_a_server_that_worked_is_started_again_in_its_pod(modules, tmp_path, capfd, code, steady, starts):
    write, environ = modules
    found, message = run(
        [write("serves", COUNTS.format(code=code)), write("waits", WAIT)], environ, restarts=2, steady=steady
    )
    assert (tmp_path / "serves.starts").read_text() == "x" * starts
    assert (found, message) == (code or 1, f"serves ended (exit code {code})")
    told = capfd.readouterr().out
    assert told.count('"process.restarted"') == starts - 1
    assert told.count("up") == 1, "its neighbour goes on"


def test_a_trainer_is_never_started_again_in_its_pod(modules, tmp_path):
    write, environ = modules
    trains = write("trains", COUNTS.format(code=1), finishes=True)
    assert run([trains], environ, restarts=2, steady=0.0)[0] == 1
    assert (tmp_path / "trains.starts").read_text() == "x"


@pytest.mark.slow
def test_stop_ends_everything_and_kills_what_does_not_listen(modules, capfd):
    write, environ = modules
    deaf = WAIT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    pod = Pod([write("waits", WAIT), write("deaf", deaf)], environ, grace=1.0)

    codes = []
    running = threading.Thread(target=lambda: codes.append(pod.run()), daemon=True)
    running.start()
    deadline, said = time.monotonic() + SECONDS, ""
    while (said := said + capfd.readouterr().out).count("up") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pod.stop()
    running.join(SECONDS)
    assert codes == [128 + signal.SIGTERM]


@pytest.fixture
def hostile_folder(monkeypatch, tmp_path):
    """The current folder, with modules named as the standard library's; they must not run."""
    for name in ("json", "locale"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_modules_in_the_current_folder_stand_for_no_others_in_pods(hostile_folder):
    assert run([ProcessSpec("calendar", "calendar", {}, finishes=True)], os.environ) == (0, "")
    assert not (hostile_folder / "it-ran").exists()


def test_modules_in_the_current_folder_stand_for_no_others_in_a_local_run(hostile_folder):
    spawner = ExecSpawner(dict(os.environ), hostile_folder / "zygote.log")
    try:
        spawner.spawn(ProcessSpec("calendar", "calendar", dict(os.environ), hostile_folder / "calendar.log"))
        events, deadline = [], time.monotonic() + SECONDS
        while not any(isinstance(event, Exited) for event in events):
            assert time.monotonic() < deadline, events
            events += spawner.poll()
            time.sleep(0.02)
    finally:
        spawner.close()
    assert events[-1] == Exited("calendar", 0), (hostile_folder / "calendar.log").read_text()
    assert not (hostile_folder / "it-ran").exists()


def test_main_refuses_a_pod_without_a_job(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DOVETAIL_JOB", "demo")
    monkeypatch.setenv("DOVETAIL_TOKEN", "secret")
    assert main([]) == 2
    assert "DOVETAIL_RUN_DIR is not set" in capsys.readouterr().err


def test_main_leaves_the_reason_for_the_kubelet(monkeypatch, tmp_path):
    """A trainer without a coordinator to reach says so; its line ends up in the pod's status."""
    job = a_job([{"name": "train", "roles": ["trainer"]}, {"name": "gen", "roles": ["rollout"]}])
    (tmp_path / "job.json").write_text(json.dumps(in_pods(job)))
    (tmp_path / "plan.json").write_text(make_plan(job.spec).model_dump_json(by_alias=True))
    log = tmp_path / "termination-log"
    log.touch()
    environ = ProcessEnv.write(base(tmp_path)) | {"DOVETAIL_GROUP": "train", "DOVETAIL_INDEX": "0"}
    for key, value in (environ | {"DOVETAIL_COORDINATOR": "not a url"}).items():
        monkeypatch.setenv(key, value)
    assert main([], log) == 2
    assert log.read_text().startswith("trainer-0 ended (exit code 2): DOVETAIL_COORDINATOR must look like")


@pytest.mark.slow
def test_draining_retires_the_instances_and_has_the_trainers_steps_saved(tmp_path):
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self):
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    job = a_job([{"name": "both", "roles": ["trainer", "rollout"]}])
    made = pod_processes(job, make_plan(job.spec), job.spec.groups[0], 0, base(tmp_path), [], 1)
    assert len(made) == 3
    there = ProcessEnv.read(made[0].env | {"DOVETAIL_COORDINATOR": f"http://127.0.0.1:{server.server_port}"})
    drain(made, there)
    server.shutdown()
    server.server_close()
    drain(made, there)  # nobody there: no error
    asked = [
        f"/v1/instances/{name}?wait={wait}&host={there.host}"
        for waits in ((0, 0, 0), (15, 15, 900))
        for name, wait in zip(("both-0", "both-0-scorer", "trainer-0"), waits, strict=True)
    ]
    assert seen == [(path, "Bearer secret") for path in asked], "all are told before one of them is waited for"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["dovetail.pod.main", "dovetail.coordinator.main"])
def test_an_empty_token_is_named_by_the_process_that_read_it(tmp_path, module):
    env = base(tmp_path).write() | {"DOVETAIL_TOKEN": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-m", module],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert "environment variable DOVETAIL_TOKEN is empty" in done.stderr
    assert "Traceback" not in done.stderr


def ended_with(monkeypatch, run_dir, code, meanwhile=lambda: None):
    """The exit code of a pod whose processes end with this one."""

    def run(*_):
        meanwhile()
        return code, "the coordinator is gone"

    monkeypatch.setattr("dovetail.pod.main.read_pod", lambda environ: PodSettings([], base(run_dir), None, 0))
    monkeypatch.setattr("dovetail.pod.main._run", run)
    return main([])


@pytest.mark.parametrize(("surplus", "code"), [("1", 0), ("", 143)])
def test_a_drained_rollout_has_succeeded_if_it_may_come_and_go(monkeypatch, tmp_path, surplus, code):
    """Kueue would give back the quota of one that the JobSet made."""
    monkeypatch.setenv("DOVETAIL_SURPLUS", surplus)
    assert ended_with(monkeypatch, tmp_path, 143) == code


@pytest.mark.parametrize("code", [1, 143])
@pytest.mark.parametrize(("state", "ends"), [("succeeded", 0), ("failed", None)])
def test_pods_of_a_job_that_has_succeeded_end_without_an_error(monkeypatch, tmp_path, code, state, ends):
    """The JobSet ends those that are left, and a rank may miss the coordinator before."""
    write_json(tmp_path / "summary.json", {"state": "failed"})

    def end():
        write_json(tmp_path / "summary.json", {"state": state})

    assert ended_with(monkeypatch, tmp_path, code, end) == (code if ends is None else ends)


def test_a_pod_of_a_resumed_run_fails_although_the_run_once_succeeded(monkeypatch, tmp_path):
    """Its Job would take the pod for done, and make no other."""
    write_json(tmp_path / "summary.json", {"state": "succeeded"})
    assert ended_with(monkeypatch, tmp_path, 1) == 1
