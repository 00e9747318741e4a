"""Write tests/golden/objects/*.yaml anew: what the operator makes of some jobs. Look at the difference then.

python tests/golden/make_objects.py
"""

from __future__ import annotations

from pathlib import Path

import yaml

from dovetail.kube.resources import RLHFJOB
from dovetail.manifest.documents import parse
from dovetail.manifest.job_class import RLHFJobClass, parse_class
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import RLHFJob
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import jobset, surplus_jobs
from dovetail.operator.render.objects import secret, supporting_objects
from dovetail.operator.render.sandboxes import sandbox_objects
from dovetail.planner.make_plan import make_plan

FOLDER = Path(__file__).parent / "objects"
EXAMPLES = Path(__file__).parents[2] / "examples"
UID = "5d3f0e0c-1b62-4f0e-9d1a-2f8f3f1f7a11"


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def jobs() -> dict[str, tuple[RLHFJob, OperatorSettings]]:
    """By name of the golden file."""
    cluster = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    colocated = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    colocated["metadata"] |= {"namespace": "team-a", "labels": {"kueue.x-k8s.io/queue-name": "research", "team": "a"}}
    colocated["spec"]["models"]["critic"] = {"source": {"pvc": "models/critics/small"}}
    colocated["spec"]["checkpoint"]["volume"] = "shared"
    colocated["spec"]["groups"] = [
        {
            "name": "both",
            "roles": ["trainer", "rollout"],
            "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 4},
            "replicas": 2,
            "image": "registry.example/team/rollout:7",
            "podTemplate": {
                "metadata": {"annotations": {"team": "a"}},
                "spec": {
                    "priorityClassName": "research",
                    "containers": [{"name": "dovetail", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
                    "tolerations": None,
                },
            },
        },
        {"name": "spare", "roles": ["rollout"], "minReplicas": 1, "maxReplicas": 3},
    ]
    admin = OperatorSettings(
        api_account="dovetail-api",
        pull_secrets=("registry",),
        surplus_priority_class="dovetail-surplus",
        metrics_from=[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        pod_template={"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "10Gi"}}]}},
    )
    classed = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    classed["metadata"]["namespace"] = "team-a"
    classed["spec"] |= {"class": "cpus", "hub": {"tokenSecret": {"name": "hub"}}}
    classed["spec"]["groups"][0]["podTemplate"] = {"spec": {"nodeSelector": {"pool": "mine", "disk": "fast"}}}
    sandboxed = yaml.safe_load((EXAMPLES / "quickstart-cluster.yaml").read_text())
    sandboxed["spec"]["models"]["reward"] = {
        "function": "dovetail.coordinator.rewards.earned:earned",
        "code": {"pvc": "team/agents/game"},
    }
    sandboxed["spec"]["sessions"] = {"environment": {"function": "game:Game"}, "sandbox": "Pod", "sandboxPods": 2}
    gvisor = OperatorSettings(sandboxes=True, sandbox_template={"spec": {"runtimeClassName": "gvisor"}})
    return {
        "quickstart": (_job(cluster), OperatorSettings()),
        "sandboxed": (_job(sandboxed), gvisor),
        "colocated": (_job(colocated), admin),
        "classed": (_job(classed), admin),
    }


def job_class() -> RLHFJobClass:
    """The class of the job `classed`."""
    limited = {"name": "dovetail", "resources": {"limits": {"memory": "64Gi"}}}
    return parse_class(
        {
            "apiVersion": "dovetail.dev/v1alpha1",
            "kind": "RLHFJobClass",
            "metadata": {"name": "cpus"},
            "spec": {
                "namespaces": ["team-a", "team-b"],
                "queue": "research",
                "podTemplate": {
                    "metadata": {"labels": {"cost-centre": "17"}},
                    "spec": {
                        "nodeSelector": {"pool": "rlhf"},
                        "terminationGracePeriodSeconds": 60,
                        "volumes": [{"name": "corpus", "nfs": {"server": "10.0.0.9", "path": "/corpus"}}],
                        "containers": [
                            {"name": "dovetail", "volumeMounts": [{"name": "corpus", "mountPath": "/corpus"}]}
                        ],
                    },
                },
                "coordinator": {"podTemplate": {"spec": {"serviceAccountName": "uploader"}}},
                "trainer": {"image": "registry.example/trainer:3", "podTemplate": {"spec": {"containers": [limited]}}},
                "rollout": {"image": "registry.example/rollout:3"},
                "allowed": {
                    "fields": ["spec.nodeSelector"],
                    "images": ["registry.example.com/dovetail/*"],
                    "secrets": ["hub"],
                },
            },
        }
    )


def _job(document: dict[str, object]) -> RLHFJob:
    job = parse({**document, **RLHFJOB.type_meta})
    return job.model_copy(update={"spec": resolve(job.spec)})


def rendered(job: RLHFJob, settings: OperatorSettings) -> str:
    given = job_class() if job.spec.job_class is not None else None
    assert given is None or given.problems(job) == []
    # Figures of a model of time are no part of what is rendered.
    plan = make_plan(job.spec).model_copy(update={"prediction": None})
    context = RenderContext(job, UID, plan, settings, job_class=given)
    objects = [secret(context, "0" * 64), *supporting_objects(context), jobset(context), *surplus_jobs(context)]
    objects += sandbox_objects(context, "10.9.8.7")
    return yaml.dump_all(objects, Dumper=_NoAliases, sort_keys=False, width=110)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (job, settings) in jobs().items():
        (FOLDER / f"{name}.yaml").write_text(rendered(job, settings))


if __name__ == "__main__":
    main()
