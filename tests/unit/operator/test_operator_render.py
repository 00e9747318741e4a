"""Objects of a job: golden files, and what must hold for every job."""

import copy
import json
from dataclasses import replace

import pytest
import yaml
from golden import make_objects
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.kube import names
from dovetail.manifest.checks import pod_templates
from dovetail.manifest.checks.pod_templates import quantity
from dovetail.manifest.documents import parse
from dovetail.manifest.merge import MergeError, merge
from dovetail.manifest.resolve import resolve
from dovetail.manifest.types import RLHFJob
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.reconcile.replan import needs
from dovetail.operator.render.config_map import in_pods, spec_hash
from dovetail.operator.render.context import RenderContext
from dovetail.operator.render.jobset import claim_names, jobset, surplus_jobs, workload
from dovetail.operator.render.objects import supporting_objects
from dovetail.operator.render.pod import group_pod
from dovetail.planner.make_plan import make_plan
from dovetail.protocol.plan import Plan
from dovetail.protocol.process.env import AGENTS_PORT, ProcessEnv
from helpers import openshift


def a_context(settings=None, labels=None, namespace="default", **changes):
    document = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text())
    document["metadata"] |= {"namespace": namespace, "labels": labels or {}}
    for path, value in changes.items():
        document["spec"][path] = value
    job = parse(document)
    job = job.model_copy(update={"spec": resolve(job.spec)})
    return RenderContext(job, make_objects.UID, make_plan(job.spec), settings or OperatorSettings())


def pods(context):
    """(name of the replicated job or Job, pod specification, pod labels) of every pod template."""
    for job in jobset(context)["spec"]["replicatedJobs"]:
        template = job["template"]["spec"]["template"]
        yield job["name"], template["spec"], template["metadata"]["labels"]
    for job in surplus_jobs(context):
        template = job["spec"]["template"]
        yield job["metadata"]["name"], template["spec"], template["metadata"]["labels"]


@pytest.mark.parametrize("name", sorted(make_objects.jobs()))
def test_golden(name):
    expected = (make_objects.FOLDER / f"{name}.yaml").read_text()
    assert make_objects.rendered(*make_objects.jobs()[name]) == expected, "run python tests/golden/make_objects.py"


def test_every_child_but_a_kept_claim_is_owned_and_labelled():
    claim = next(thing for thing in supporting_objects(a_context()) if thing["kind"] == "PersistentVolumeClaim")
    assert "ownerReferences" not in claim["metadata"]
    assert claim["metadata"]["labels"][names.UID_LABEL] == make_objects.UID
    assert "app.kubernetes.io/instance" not in claim["metadata"]["labels"], "Argo CD would prune it"
    assert claim["metadata"]["annotations"].items() >= names.NEVER_PRUNED.items()
    context = a_context(storage={"retain": "Delete"})
    for child in [*supporting_objects(context), jobset(context), *surplus_jobs(context)]:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("RLHFJob", make_objects.UID, True)
        assert child["metadata"]["labels"][names.JOB_LABEL] == "quickstart"
        assert child["metadata"]["namespace"] == "default"


def test_pods_meet_the_restricted_standard():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards: the restricted profile."""
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for _, spec, _ in pods(a_context()):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= allowed
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert all("hostPort" not in port for port in container["ports"])


def test_gpu_groups_ask_for_their_product_and_cpu_groups_for_none():
    context = a_context(
        groups=[
            {"name": "a100", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}},
            {"name": "cpu", "roles": ["rollout"]},
        ]
    )
    found = {name: spec for name, spec, _ in pods(context)}
    assert found["a100"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert found["a100"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert found["a100"]["tolerations"]
    assert "nodeSelector" not in found["cpu"]
    assert found["a100"]["containers"][0]["resources"]["requests"]["cpu"] == "1000m"
    assert "limits" not in found["cpu"]["containers"][0]["resources"]
    assert "nodeSelector" not in found["coordinator"]


def test_gpus_may_come_through_a_claim():
    """Of dynamic resource allocation. The template decides which nodes will do."""
    gpu = {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2, "claimTemplate": "two-a100"}
    context = a_context(
        groups=[{"name": "train", "roles": ["trainer"], "gpu": gpu}, {"name": "c", "roles": ["rollout"]}]
    )
    pod = {name: spec for name, spec, _ in pods(context)}["train"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "two-a100"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert "limits" not in pod["containers"][0]["resources"]
    assert "nodeSelector" not in pod
    assert "claimTemplate" not in json.dumps(in_pods(context.job))
    assert needs(context) == [], "such GPUs are not counted on nodes"
    more = {"spec": {"resourceClaims": [{"name": "nic", "resourceClaimName": "fast"}]}}
    merged = merge({"spec": pod}, more)["spec"]["resourceClaims"]
    assert [claim["name"] for claim in merged] == ["gpus", "nic"]


CPUS = [{"name": "trainers", "roles": ["trainer"]}, {"name": "rollouts", "roles": ["rollout"]}]
GPUS = [
    {"name": "trainers", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}},
    {"name": "rollouts", "roles": ["rollout"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 1}},
]


def requested(context):
    """The memory that a pod of each group asks for."""
    found = {name: spec["containers"][0]["resources"] for name, spec, _ in pods(context)}
    return {name: found[name].get("requests", {}).get("memory") for name in ("trainers", "rollouts")}


def test_pods_on_cpus_ask_for_the_memory_that_the_plan_predicts():
    context = a_context(groups=CPUS)
    used = {pod.group: pod.used for pod in context.plan.memory}
    found = requested(context)
    for group in ("trainers", "rollouts"):
        asked = quantity(found[group])
        assert asked is not None
        assert max(2**30, 1.1 * used[group]) <= asked < max(2**30, 1.1 * used[group]) + 2**28
    unknown = replace(context, plan=context.plan.model_copy(update={"memory": []}))
    assert requested(unknown) == {"trainers": "1Gi", "rollouts": "1Gi"}


def test_pods_with_gpus_ask_for_their_processes_and_what_the_gpus_keep_in_host_memory():
    context = a_context(groups=GPUS)
    prediction = context.plan.prediction
    # Two trainer ranks; a worker, an API server, an engine core and a scorer: of 2 GiB each.
    assert requested(context) == {"trainers": "4Gi", "rollouts": "8Gi"}
    memory = [m.model_copy(update={"host": {"moments": 10.0 * 2**30}}) for m in prediction.memory]
    offloaded = prediction.model_copy(update={"memory": memory})
    context = replace(context, plan=context.plan.model_copy(update={"prediction": offloaded}))
    # Page-locked memory is rounded up.
    assert requested(context) == {"trainers": "34Gi", "rollouts": "23Gi"}


def test_servers_that_sleep_keep_their_weights_in_host_memory():
    both = [{**GPUS[0], "name": "trainers"}, {**GPUS[1], "vllmArgs": ["--enable-sleep-mode"]}]
    context = a_context(groups=both)
    prediction = context.plan.prediction
    memory = [
        m.model_copy(update={"parts": {"generation: weights": 4.0 * 2**30}, "host": {}}) for m in prediction.memory
    ]
    context = replace(
        context, plan=context.plan.model_copy(update={"prediction": prediction.model_copy(update={"memory": memory})})
    )
    assert requested(context) == {"trainers": "4Gi", "rollouts": "14Gi"}


@pytest.mark.parametrize("kind", ["requests", "limits"])
def test_what_a_pod_template_says_of_memory_stands(kind):
    """Also a limit alone: Kubernetes asks for as much then, and refuses to ask for more."""
    template = {"spec": {"containers": [{"name": "dovetail", "resources": {kind: {"memory": "512Mi"}}}]}}
    context = a_context(groups=[CPUS[0] | {"podTemplate": template}, CPUS[1]])
    assert requested(context)["trainers"] == ("512Mi" if kind == "requests" else None)
    assert quantity(requested(context)["rollouts"]) >= 2**30


def test_processes_read_their_environment_from_what_pods_set():
    """Whatever Kubernetes fills in, the rest of the variables must be those of ProcessEnv."""
    for name, spec, _ in pods(a_context()):
        variables = {v["name"]: v.get("value", "7") for v in spec["containers"][0]["env"]}
        env = ProcessEnv.read({"DOVETAIL_NAME": "set-by-the-pod's-program"} | variables)
        assert str(env.config_dir) in [m["mountPath"] for m in spec["containers"][0]["volumeMounts"]], name
        assert str(env.run_dir).startswith("/var/dovetail/quickstart-")
        assert env.coordinator == "http://quickstart-coordinator.default.svc:8000"


def test_the_service_selects_the_coordinator_alone():
    context = a_context()
    (service,) = [o for o in supporting_objects(context) if o["kind"] == "Service"]
    selector = service["spec"]["selector"].items()
    assert [name for name, _, labels in pods(context) if selector <= labels.items()] == ["coordinator"]


PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
TRAINERS = {"name": "t", "roles": ["trainer"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 3}}
ROLLOUTS = {"name": "r", "roles": ["rollout"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 1}}
BOTH = {"name": "b", "roles": ["trainer", "rollout"], "gpu": {"product": "NVIDIA-A100-SXM4-80GB", "perPod": 2}}


def ingress_of(context):
    """(who, ports) of each rule of the job's NetworkPolicy; None stands for everybody, and for all ports."""
    (policy,) = (child for child in supporting_objects(context) if child["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports")
        numbers = ports and {n for p in ports for n in range(p["port"], p.get("endPort", p["port"]) + 1)}
        yield rule.get("from"), numbers


def test_nobody_scrapes_a_job_unless_named():
    (job, any_port), (dovetail, coordinator) = ingress_of(a_context())
    assert (job, any_port) == ([{"podSelector": {"matchLabels": {names.JOB_LABEL: "quickstart"}}}], None)
    assert coordinator == {8000}
    (peer,) = dovetail
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "dovetail-system"}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["operator", "api"]


@pytest.mark.parametrize(
    ("groups", "ports"),
    [
        (None, {8000, 8001, 8002, 9000}),
        ([TRAINERS, ROLLOUTS], {8000, 8001, 8002, 9000, 9001, 9002}),
        ([BOTH], {8000, 8001, 8002, 9000, 9001}),
    ],
)
def test_who_is_named_scrapes_the_ports_that_pods_use_and_no_others(groups, ports):
    context = a_context(OperatorSettings(metrics_from=[PROMETHEUS]), **({"groups": groups} if groups else {}))
    assert list(ingress_of(context))[2:] == [([PROMETHEUS], ports)]
    used = {p["containerPort"] for _, spec, _ in pods(context) for c in spec["containers"] for p in c["ports"]}
    assert used == ports


def test_a_service_that_plays_episodes_reaches_the_port_of_their_turns_alone():
    models = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text())["spec"]["models"]
    models["reward"] = {"function": "dovetail.coordinator.rewards.earned:earned"}
    context = a_context(sessions={"agent": {"url": "http://agents:8000"}}, models=models)
    assert list(ingress_of(context))[2:] == [(None, {AGENTS_PORT})]


def test_the_disruption_budget_lets_one_guaranteed_pod_go():
    context = a_context()
    (budget,) = [o for o in supporting_objects(context) if o["kind"] == "PodDisruptionBudget"]
    guaranteed = sum(j["template"]["spec"]["completions"] for j in jobset(context)["spec"]["replicatedJobs"])
    assert guaranteed == 1 + 2 + 1 + 1
    assert budget["spec"]["minAvailable"] == guaranteed - 1


def test_surplus_rollouts_count_on_from_the_guaranteed_ones():
    groups = [
        {"name": "train", "roles": ["trainer"], "replicas": 2},
        {"name": "gen", "roles": ["rollout"], "minReplicas": 2, "maxReplicas": 4},
    ]
    context = a_context(
        OperatorSettings(surplus_priority_class="low"),
        {
            "kueue.x-k8s.io/queue-name": "q",
            "kueue.x-k8s.io/priority-class": "urgent",
            "kueue.x-k8s.io/prebuilt-workload-name": "w",
            "a": "b",
        },
        groups=groups,
    )
    jobs = surplus_jobs(context)
    assert [j["metadata"]["name"] for j in jobs] == ["quickstart-gen-s2", "quickstart-gen-s3"]
    assert all(j["spec"]["template"]["spec"]["priorityClassName"] == "low" for j in jobs)
    assert all(j["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q" for j in jobs)
    assert not any("kueue.x-k8s.io/prebuilt-workload-name" in j["metadata"]["labels"] for j in jobs), "the JobSet's"
    assert not any("kueue.x-k8s.io/priority-class" in j["metadata"]["labels"] for j in jobs), "the first to go"
    sizes = {j["name"]: j["template"]["spec"]["completions"] for j in jobset(context)["spec"]["replicatedJobs"]}
    assert sizes == {"coordinator": 1, "train": 2, "gen": 2}
    assert jobset(context)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert jobset(context)["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    assert "a" not in jobset(context)["metadata"]["labels"]
    assert all("priorityClassName" not in spec for name, spec, _ in pods(context) if not name.startswith("quickstart-"))


def test_the_config_map_holds_what_processes_parse():
    context = a_context(models={"actor": {"source": {"pvc": "models/llama/8b"}}})
    (config,) = [o for o in supporting_objects(context) if o["kind"] == "ConfigMap"]
    job = RLHFJob.model_validate_json(config["data"]["job.json"])
    assert job.spec.models.actor.source.path == "/var/dovetail-claims/models/llama/8b"
    assert job.spec.models.actor.source.pvc is None
    assert Plan.model_validate_json(config["data"]["plan.json"]) == context.plan
    for _, spec, _ in pods(context):
        assert "/var/dovetail-claims/models" in [m["mountPath"] for m in spec["containers"][0]["volumeMounts"]]


def test_a_claim_of_the_users_is_not_made():
    made = [o["kind"] for o in supporting_objects(a_context(checkpoint={"volume": "mine"}))]
    assert "PersistentVolumeClaim" not in made
    assert "PersistentVolumeClaim" in [o["kind"] for o in supporting_objects(a_context())]


@pytest.mark.slow
def test_the_hash_follows_what_a_plan_depends_on():
    one = a_context().job
    assert spec_hash(one) == spec_hash(a_context(suspend=True).job)
    assert spec_hash(one) == spec_hash(a_context(activeDeadlineSeconds=5).job)
    assert spec_hash(one) != spec_hash(a_context(seed=5).job)


def test_documents_are_json():
    context = a_context()
    for child in [*supporting_objects(context), jobset(context), *surplus_jobs(context)]:
        assert json.loads(json.dumps(child)) == child
    assert json.loads(json.dumps(in_pods(context.job)))["metadata"] == {"name": "quickstart", "namespace": "default"}


# ---------------------------------------------------------------- strategic merge


BASE = {"spec": {"a": 1, "containers": [{"name": "x", "env": [{"name": "A", "value": "1"}], "args": ["1", "2"]}]}}


def test_lists_with_keys_are_merged_and_others_replaced():
    patch = {
        "spec": {
            "containers": [
                {"name": "y"},
                {"name": "x", "args": ["3"], "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]},
            ]
        }
    }
    merged = merge(BASE, patch)
    x, y = merged["spec"]["containers"]
    assert x == {"name": "x", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}], "args": ["3"]}
    assert y == {"name": "y"}
    assert merged["spec"]["a"] == 1


def test_null_and_directives():
    assert merge(BASE, {"spec": {"a": None}})["spec"].keys() == {"containers"}
    assert merge(BASE, {"spec": {"containers": [{"name": "x", "$patch": "delete"}]}})["spec"]["containers"] == []
    assert merge(BASE, {"spec": {"$patch": "replace", "b": 2}}) == {"spec": {"b": 2}}
    assert merge(BASE, {"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}})["spec"]["containers"] == [
        {"name": "z"}
    ]


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, r"podTemplate.spec.containers\[0\] lacks name"),
        ({"spec": {"containers": ["x"]}}, r"podTemplate.spec.containers\[0\] must be an object"),
        ({"spec": {"$patch": "delete"}}, "only replace is understood"),
    ],
)
def test_bad_patches_say_where(patch, sentence):
    with pytest.raises(MergeError, match=sentence):
        merge(BASE, patch)


values = st.recursive(
    st.none() | st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
documents = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


# A busy machine is not the strategy's fault.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents, documents)
def test_merging_changes_neither_side_and_is_idempotent(base, patch):
    before = copy.deepcopy((base, patch))
    once = merge(base, patch)
    assert (base, patch) == before
    assert merge(once, patch) == once


def with_own_things(**more):
    """A job with data, tokenizer and model on claims, functions in a ConfigMap, and a hub's token and cache."""
    claimed = {"pvc": "mine/data.jsonl"}
    models = {
        "actor": {"source": {"pvc": "weights/llama"}},
        "tokenizer": {"pvc": "weights/tokenizer"},
        "reward": {"function": "grader:score", "code": {"configMap": "grader"}},
    }
    return a_context(
        models=models,
        data={"demonstrations": [claimed], "prompts": [claimed, {"huggingFace": "a/b"}]},
        hub={"tokenSecret": {"name": "hf"}, "cacheClaim": "shared"},
        coordinator={
            "image": "registry.example.com/grader:1",
            "podTemplate": {"spec": {"tolerations": [{"key": "cpu", "operator": "Exists"}]}},
        },
        **more,
    )


def test_no_template_may_use_the_name_of_a_volume_of_a_pod():
    context = with_own_things(output={"pvc": "results/a"})
    rendered = {volume["name"] for _, spec, _ in pods(context) for volume in spec["volumes"]}
    claims = {name for name in rendered if name.startswith("claim-")}
    assert rendered - claims == {*pod_templates.VOLUMES, *pod_templates.SCRATCH_MOUNTS.values()}


def test_each_pod_mounts_what_its_processes_read_and_the_coordinator_alone_has_the_hubs_token():
    context = with_own_things()
    for name, spec, _ in pods(context):
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        coordinator = name == "coordinator"
        own = {"/var/dovetail-claims/mine", "/etc/dovetail-code"}
        shared = {"/var/dovetail-claims/weights", "/var/dovetail-hub"}
        assert shared <= set(mounts)
        assert own & set(mounts) == (own if coordinator else set())
        for path in (own & set(mounts)) | shared:
            assert mounts[path]["readOnly"]
            assert mounts[path]["name"] in volumes
        tokens = [variable for variable in container["env"] if variable["name"] == "HF_TOKEN"]
        where = {"name": "hf", "key": "token"}
        assert tokens == ([{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": where}}] if coordinator else [])
        assert ({"key": "cpu", "operator": "Exists"} in spec.get("tolerations", [])) == coordinator
        assert (container["image"] == "registry.example.com/grader:1") == coordinator
        if coordinator:
            claims = {v["persistentVolumeClaim"]["claimName"] for n, v in volumes.items() if n.startswith("claim-")}
            assert claims == {"mine", "weights"}
    spec = in_pods(context.job)["spec"]
    assert spec["data"]["prompts"][0]["path"] == "/var/dovetail-claims/mine/data.jsonl"
    assert spec["models"]["tokenizer"]["path"] == "/var/dovetail-claims/weights/tokenizer"
    assert spec["models"]["reward"]["importPath"] == "/etc/dovetail-code"
    assert RLHFJob.model_validate(in_pods(context.job)).spec.hub.cache_claim == "shared"


def test_the_claims_that_pods_name_are_known():
    assert claim_names(with_own_things()) == {f"{with_own_things().name}-files", "mine", "weights", "shared"}
    volumes = [{"name": "x", "persistentVolumeClaim": {"claimName": "scratch"}}]
    trainer = {"name": "a", "roles": ["trainer", "rollout"], "podTemplate": {"spec": {"volumes": volumes}}}
    context = a_context(groups=[trainer], checkpoint={"volume": "runs"}, output={"pvc": "results/a"})
    assert claim_names(context) == {"runs", "results", "scratch"}


def test_a_claim_of_several_uses_is_one_volume_of_a_pod():
    """Of two volumes of a claim, one of them read-only, a kubelet mounts either: the models could not be copied."""
    ours = {"models": {"actor": {"source": {"pvc": "all/llama"}}}, "output": {"pvc": "all/trained"}}
    mounts = [{"name": "mine", "mountPath": "/mine"}, {"name": "old", "mountPath": "/old"}]
    volumes = [
        {"name": "mine", "persistentVolumeClaim": {"claimName": "all"}},
        {"name": "old", "persistentVolumeClaim": {"claimName": "old", "readOnly": True}},
    ]
    patch = {"spec": {"containers": [{"name": "dovetail", "volumeMounts": mounts}], "volumes": volumes}}
    for more, written in (
        ({"checkpoint": {"volume": "all"}}, {"/var/dovetail"}),
        ({}, set()),
        ({"coordinator": {"podTemplate": patch}}, {"/mine"}),
    ):
        context = a_context(hub={"cacheClaim": "all"}, **ours, **more)
        for name, spec, _ in pods(context):
            claims = {}
            for volume in spec["volumes"]:
                if (source := volume.get("persistentVolumeClaim")) is not None:
                    assert source["claimName"] not in claims, volume
                    claims[source["claimName"]] = volume["name"], source.get("readOnly", False)
            (container,) = spec["containers"]
            writable = {m["mountPath"]: m for m in container["volumeMounts"] if m["name"] == claims["all"][0]}
            wanted = {path for path in written if name == "coordinator" or path != "/mine"}
            wanted |= {"/var/dovetail-output"} if name == "coordinator" else set()
            assert {path for path, m in writable.items() if not m.get("readOnly")} == wanted
            assert {"/var/dovetail-claims/all", "/var/dovetail-hub"} <= set(writable)
            assert claims["all"][1] == (not wanted)
            assert claims.get("old", ("", True))[1], "nobody writes it"
            assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in spec["volumes"]}


@pytest.mark.slow
def test_jobs_that_say_nothing_of_coordinator_and_hub_keep_their_pods():
    """Of a job that runs when the operator is upgraded: another hash would make its pods anew."""
    unchanged = "fd5a32d3bd354e04"
    context = a_context()
    others = [
        a_context(**change)
        for change in (
            {"hub": {"tokenSecret": {"name": "hf"}}},
            {"hub": {"cacheClaim": "shared"}},
            {"coordinator": {"image": "x"}},
            {"coordinator": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}},
        )
    ]
    labels = [jobset(each)["metadata"]["labels"] for each in (context, *others)]
    assert {each[names.PODS_LABEL] for each in labels} == {unchanged}
    assert len({each[names.COORDINATOR_PODS_LABEL] for each in labels}) == 5
    assert {spec_hash(other.job) for other in others} == {spec_hash(context.job)}
    assert {"hub", "coordinator"}.isdisjoint(in_pods(context.job)["spec"])


def test_what_pods_may_connect_to_is_the_administrators():
    (open_policy,) = (o for o in supporting_objects(a_context()) if o["kind"] == "NetworkPolicy")
    assert open_policy["spec"]["policyTypes"] == ["Ingress"]
    names_only = [{"ports": [{"port": 53, "protocol": "UDP"}]}]
    settings = replace(OperatorSettings(), egress=names_only)
    (policy,) = (o for o in supporting_objects(a_context(settings=settings)) if o["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == [{"to": [{"podSelector": policy["spec"]["podSelector"]}]}, *names_only]


def test_no_user_is_named_where_the_platform_chooses_one():
    """As OpenShift's restricted-v2 asks for; what the restricted Pod Security Standard asks for stays."""
    made = jobset(a_context(settings=replace(OperatorSettings(), pod_user=0)))
    pods = [job["template"]["spec"]["template"]["spec"] for job in made["spec"]["replicatedJobs"]]
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert [pod["securityContext"] for pod in pods] == [restricted] * len(pods)
    assert OperatorSettings.read({"DOVETAIL_POD_USER": "0", "DOVETAIL_EGRESS": "[]"}).egress == []


def examples():
    """Every job of the examples that a cluster can run, as OpenShift's operator renders it."""
    settings = OperatorSettings(pod_user=0, surplus_priority_class="low")
    for path in sorted(make_objects.EXAMPLES.glob("**/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "RLHFJob" and not deep_path(document["spec"]):
                document["metadata"].setdefault("namespace", "default")
                job = parse(document)
                job = job.model_copy(update={"spec": resolve(job.spec)})
                yield RenderContext(job, make_objects.UID, make_plan(job.spec), settings)


def deep_path(spec):
    """Whether it reads files of one machine."""
    return "path" in json.dumps(spec.get("data", {}))


@pytest.mark.slow
def test_openshift_admits_every_pod_of_the_examples():
    """Its policy restricted-v2, which every account has."""
    contexts = list(examples())
    assert len(contexts) > 3
    for context in contexts:
        for name, spec, _ in pods(context):
            run, why = openshift.admit(spec)
            assert why == [], (context.name, name)
            assert run["containers"][0]["securityContext"]["runAsUser"] == openshift.USERS[0]
    _, why = openshift.admit(next(iter(pods(a_context())))[1])
    assert why == ["fsGroup 65532 is not of the namespace", "dovetail: runAsUser 65532 is not of the namespace"]
    careless = {"hostNetwork": True, "volumes": [{"name": "h", "hostPath": {"path": "/"}}]}
    careless["containers"] = [
        {"name": "c", "securityContext": {"privileged": True, "capabilities": {"add": ["SYS_PTRACE"]}}}
    ]
    assert len(openshift.admit(careless)[1]) == 4, "so the above says something"


def test_what_multikueue_sends_has_the_same_pods_in_the_other_cluster():
    """Kueue compares all containers with the Workload's. The copy of the job has another uid."""
    queue = {"kueue.x-k8s.io/queue-name": "q"}
    here = a_context(labels=queue)
    made = workload(here)
    assert made["metadata"]["name"] == f"quickstart-{make_objects.UID[:8]}"
    assert made["metadata"]["ownerReferences"][0]["kind"] == "RLHFJob"
    assert made["spec"]["queueName"] == "q"
    note = {"kueue.x-k8s.io/prebuilt-workload-name": made["metadata"]["name"]}
    copied = here.job.metadata.model_copy(update={"annotations": note})
    there = replace(here, uid="another-uid", job=here.job.model_copy(update={"metadata": copied}))
    theirs = jobset(there)
    assert theirs["metadata"]["annotations"] == note, "Kueue 0.18 reads it there, earlier ones read a label"
    sets = {each["name"]: each for each in made["spec"]["podSets"]}
    for job in theirs["spec"]["replicatedJobs"]:
        template = job["template"]["spec"]["template"]["spec"]
        mine = sets[job["name"]]["template"]["spec"]
        assert [template[key] for key in ("containers",)] == [mine[key] for key in ("containers",)]
        assert template.get("tolerations") == mine.get("tolerations")
        assert sets[job["name"]]["count"] == job["replicas"] * job["template"]["spec"]["parallelism"]
    assert names.run_dir(there.job, there.uid) == names.run_dir(here.job, here.uid)


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_trainers_may_ask_to_be_close_to_each_other(how):
    """Kueue reads it from the JobSet, and for jobs that MultiKueue sends from the Workload alone."""
    note = {f"kueue.x-k8s.io/podset-{how}-topology": "example.com/rack"}
    groups = [
        {"name": "train", "roles": ["trainer"], "replicas": 2, "podTemplate": {"metadata": {"annotations": note}}},
        {"name": "gen", "roles": ["rollout"]},
    ]
    context = a_context(labels={"kueue.x-k8s.io/queue-name": "q"}, groups=groups)
    made = {job["name"]: job["template"]["spec"]["template"] for job in jobset(context)["spec"]["replicatedJobs"]}
    assert note.items() <= made["train"]["metadata"]["annotations"].items()
    sets = {each["name"]: each.get("topologyRequest") for each in workload(context)["spec"]["podSets"]}
    index = {
        "podIndexLabel": "batch.kubernetes.io/job-completion-index",
        "subGroupIndexLabel": "jobset.sigs.k8s.io/job-index",
    }
    wanted = {how: "example.com/rack", **index, "subGroupCount": 1}
    assert sets == {"coordinator": None, "train": wanted, "gen": None}


@pytest.mark.parametrize("name", ["../others", "quickstart-", "other-0123abcd", "quickstart-0123abcd/.."])
def test_a_workloads_name_is_a_folder_only_if_an_operator_made_it(name):
    context = a_context()
    note = {"kueue.x-k8s.io/prebuilt-workload-name": name}
    copied = context.job.metadata.model_copy(update={"annotations": note})
    job = context.job.model_copy(update={"metadata": copied})
    assert names.folder(job, "89abcdef-1") == "quickstart-89abcdef"


def test_a_preemptible_group_runs_on_spot_nodes_of_the_usual_clouds():
    document = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text())
    groups = document["spec"]["groups"]
    groups[1] |= {"preemptible": True, "replicas": 3}
    made = {job["name"]: job for job in jobset(a_context(groups=groups))["spec"]["replicatedJobs"]}
    pods = {name: job["template"]["spec"]["template"]["spec"] for name, job in made.items()}
    spot, other = pods["v100"], pods["a10"]
    assert (made["v100"]["replicas"], made["v100"]["template"]["spec"]["completions"]) == (3, 1), "a Job each"
    (index,) = (each for each in spot["containers"][0]["env"] if each["name"] == "DOVETAIL_INDEX")
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    tolerated = {(each["key"], each.get("value")) for each in spot["tolerations"]}
    assert ("kubernetes.azure.com/scalesetpriority", "spot") in tolerated, "AKS taints all of its spot nodes"
    assert {("cloud.google.com/gke-spot", "true"), ("karpenter.sh/capacity-type", "spot")} < tolerated
    assert ("nvidia.com/gpu", None) in tolerated
    assert spot["terminationGracePeriodSeconds"] < 30 < other["terminationGracePeriodSeconds"], "GKE and AKS wait 30 s"
    rules = spot["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = {rule["preference"]["matchExpressions"][0]["key"] for rule in rules}
    assert keys == {key for key, _ in tolerated} - {"nvidia.com/gpu"}, "any cloud's spot nodes are preferred"
    assert "affinity" not in other
    assert "preemptible" not in in_pods(a_context(groups=groups).job)["spec"]["groups"][1]


def ganged(gang, **more):
    """The PodGroup (None if there is none), the pod templates of the JobSet by name, and a surplus rollout's."""
    context = a_context(settings=replace(OperatorSettings(), gang=gang), **more)
    groups = [thing for thing in supporting_objects(context) if thing["kind"] == "PodGroup"]
    jobs = {j["name"]: j["template"]["spec"]["template"] for j in jobset(context)["spec"]["replicatedJobs"]}
    return (groups or [None])[0], jobs, surplus_jobs(context)[0]["spec"]["template"]


def test_kubernetes_own_gangs():
    group, pods, surplus = ganged("Kubernetes")
    assert group["apiVersion"] == "scheduling.k8s.io/v1alpha2"
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 5}}}, "1 coordinator, 2 trainers, 2 rollouts"
    name = group["metadata"]["name"]
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in pods.values()} == {name}
    assert "schedulingGroup" not in surplus["spec"], "surplus rollouts come and go"
    assert "schedulerName" not in pods["a100"]["spec"]


def test_gangs_of_volcano_and_coscheduling():
    group, pods, surplus = ganged("Volcano")
    assert (group["apiVersion"], group["spec"]) == ("scheduling.volcano.sh/v1beta1", {"minMember": 5})
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"volcano"}
    marks = {pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in pods.values()}
    assert marks == {group["metadata"]["name"]}
    assert "annotations" not in surplus["metadata"]
    group, pods, _ = ganged("Coscheduling", failurePolicy={"startTimeoutSeconds": 600})
    assert group["spec"] == {"minMember": 5, "scheduleTimeoutSeconds": 600}
    marks = {pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for pod in pods.values()}
    assert marks == {group["metadata"]["name"]}


def test_gangs_of_yunikorn_give_gpus_back_after_the_deadline():
    group, pods, _ = ganged("YuniKorn", failurePolicy={"startTimeoutSeconds": 600})
    assert group is None
    notes = pods["a100"]["metadata"]["annotations"]
    assert notes["yunikorn.apache.org/schedulingPolicyParameters"].endswith("placeholderTimeoutInSeconds=600")
    tasks = {task["name"]: task for task in json.loads(notes["yunikorn.apache.org/task-groups"])}
    assert {name: task["minMember"] for name, task in tasks.items()} == {
        "coordinator": 1,
        "a100": 2,
        "v100": 1,
        "a10": 1,
    }
    asked = pods["a100"]["spec"]["containers"][0]["resources"]
    assert tasks["a100"]["minResource"] == asked["requests"] | asked["limits"]
    assert tasks["a100"]["minResource"]["nvidia.com/gpu"] == "1"
    assert tasks["a100"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


def test_gangs_of_kai_come_from_the_jobset():
    """KAI makes the PodGroup. Of the JobSet it reads the queue, and earlier versions the number of pods."""
    queue = {"kai.scheduler/queue": "research"}
    group, pods, surplus = ganged("KAI", labels={**queue, "team": "a"})
    assert group is None
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"kai-scheduler"}
    assert all(queue.items() <= pod["metadata"]["labels"].items() for pod in pods.values())
    assert "schedulerName" not in surplus["spec"], "surplus rollouts come and go"
    made = jobset(a_context(OperatorSettings(gang="KAI"), {**queue, "team": "a"}))["metadata"]
    assert made["annotations"] == {"kai.scheduler/batch-min-member": "5"}
    assert (made["labels"]["kai.scheduler/queue"], "team" in made["labels"]) == ("research", False)
    assert "annotations" not in jobset(a_context(labels=queue))["metadata"]


def test_jobs_in_a_queue_of_kueue_have_no_second_gang():
    group, pods, _ = ganged("Volcano", labels={"kueue.x-k8s.io/queue-name": "research"})
    assert group is None
    assert "schedulerName" not in pods["coordinator"]["spec"]


def test_a_gang_of_another_size_has_another_name():
    """Its size may not change."""
    small = ganged("Kubernetes")[0]["metadata"]["name"]
    groups = yaml.safe_load((make_objects.EXAMPLES / "quickstart-cluster.yaml").read_text())["spec"]["groups"]
    groups[2] |= {"minReplicas": 2, "maxReplicas": 3}
    assert ganged("Kubernetes", groups=groups)[0]["metadata"]["name"] != small
    with pytest.raises(ValueError, match="DOVETAIL_GANG is 'Slurm'"):
        OperatorSettings.read({"DOVETAIL_GANG": "Slurm"})


def test_the_status_quotes_no_file_that_a_template_names():
    """The kubelet copies the file at terminationMessagePath into the pod's status."""
    patch = {"name": "dovetail", "terminationMessagePath": "/secret/key"}
    context = a_context(groups=[CPUS[0] | {"podTemplate": {"spec": {"containers": [patch]}}}, CPUS[1]])
    (mine,) = group_pod(context, context.job.spec.groups[0])["spec"]["containers"]
    assert "terminationMessagePath" not in mine
    assert mine["terminationMessagePolicy"] == "FallbackToLogsOnError"
    patch |= {"command": ["cat", "/secret/key"]}
    context = a_context(groups=[CPUS[0] | {"podTemplate": {"spec": {"containers": [patch]}}}, CPUS[1]])
    (mine,) = group_pod(context, context.job.spec.groups[0])["spec"]["containers"]
    assert mine["command"] == ["cat", "/secret/key"]
    assert "terminationMessagePolicy" not in mine, "the log of another program is not quoted"
