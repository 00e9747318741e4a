"""The planner needs nothing that is compiled but pydantic's core, so that it runs in a browser too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.example_jobs import EXAMPLES

PLANS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "numba", "torch", "transformers", "cel_expr_python"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Missing())
import yaml
from dovetail.manifest.documents import parse
from dovetail.manifest.resolve import resolve
from dovetail.gpus.inventory import read
from dovetail.planner.make_plan import make_plan
from dovetail.planner.placements import recommend

job, gpus = (yaml.safe_load(open(name)) for name in sys.argv[1:])
spec = resolve(parse(job).spec)
plan, best = make_plan(spec).prediction, recommend(spec, {}, read(gpus)).prediction
print(len(plan.lags), min(plan.iteration_seconds, best.iteration_seconds) > 0)
"""


@pytest.mark.slow
def test_a_job_is_planned_where_there_is_no_numpy() -> None:
    files = [str(EXAMPLES / name) for name in ("quickstart-cluster.yaml", "inventories/a100-v100-a10.yaml")]
    done = subprocess.run([sys.executable, "-c", PLANS, *files], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3 True\n", 0), done.stderr
