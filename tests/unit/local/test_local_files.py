"""A machine that allows too few open files: said before anything starts, and mended where it may be."""

import resource
import subprocess
import sys

import pytest
import yaml
from golden import make_objects

from dovetail.launch.local.launcher import files_needed
from dovetail.manifest.documents import parse
from dovetail.planner.make_plan import make_plan
from helpers.patience import PATIENCE


def run(hard, soft, code):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_too_few_open_files_are_refused_before_anything_starts(tmp_path):
    code = "from dovetail.cli.main import main\nimport sys\nsys.argv = ['dovetail', 'run', "
    code += f"{str(make_objects.EXAMPLES / 'quickstart.yaml')!r}, '--run-dir', {str(tmp_path / 'run')!r}]\nmain()"
    code, said = run(120, 120, code)
    assert code == 2
    assert "a process may have 120 files open here and the job needs " in said
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize(("soft", "expected"), [(120, 700), (900, 900)])
def test_a_soft_limit_is_raised_and_never_lowered(soft, expected):
    code = "from dovetail.launch.local.launcher import allow_files\nimport resource\nallow_files(700)\n"
    assert run(1000, soft, code + "print(resource.getrlimit(resource.RLIMIT_NOFILE))") == (0, f"({expected}, 1000)\n")


def test_the_need_follows_the_samples_in_flight():
    job = parse(yaml.safe_load((make_objects.EXAMPLES / "quickstart.yaml").read_text()))
    needed = files_needed(job.spec, make_plan(job.spec))
    assert 256 < needed < 700
    batch = job.spec.ppo.model_copy(update={"global_batch_size": 100_000})
    assert files_needed(job.spec.model_copy(update={"ppo": batch}), make_plan(job.spec)) >= needed
