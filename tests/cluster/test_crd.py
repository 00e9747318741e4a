"""The CustomResourceDefinition on a real API server: what it accepts, refuses, fills in, shows and lets change."""

import copy
import json

import pytest
import yaml

from dovetail.manifest.checks.rules import RULES
from dovetail.manifest.checks.rules.rule import Objects
from dovetail.manifest.checks.validation import parse_manifest
from dovetail.manifest.documents import ManifestError
from dovetail.manifest.types import RLHFJob
from helpers.cluster import REPOSITORY, wait_for
from helpers.manifests import DELETE, GOOD, changed
from helpers.manifests import RULES as CASES
from helpers.rlhfjobs import CRD, DryRun, create, install_crd, mark_planned, sentences

EXAMPLES = sorted(p for p in (REPOSITORY / "examples").glob("**/*.yaml") if "kind: RLHFJob" in p.read_text())

# What types say: the API server's words.
TYPES = [
    ({"ppo.miniBatchSze": 4}, 'unknown field "spec.ppo.miniBatchSze"'),
    ({"ppo.mini_batch_size": 4}, 'unknown field "spec.ppo.mini_batch_size"'),
    ({"group": []}, 'unknown field "spec.group"'),
    ({"groups.0.gpu": {"perpod": 2}}, 'unknown field "spec.groups[0].gpu.perpod"'),
    ({"groups": DELETE}, "spec.groups: Required value"),
    ({"groups": []}, "spec.groups in body should have at least 1 items"),
    ({"groups": {}}, "spec.groups in body must be of type array"),
    ({"groups.0.name": "Big_A"}, "spec.groups[0].name in body should match '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'"),
    ({"groups.0.name": DELETE}, "spec.groups[0].name: Required value"),
    ({"groups.0.roles": ["trainr"]}, 'spec.groups[0].roles[0]: Unsupported value: "trainr"'),
    ({"groups.0.replicas": 0}, "spec.groups[0].replicas in body should be greater than or equal to 1"),
    ({"groups.1.name": "trainers"}, 'spec.groups[1]: Duplicate value: {"name":"trainers"}'),
    ({"groups.0.roles": ["trainer", "trainer"]}, 'spec.groups[0].roles[1]: Duplicate value: "trainer"'),
    ({"models.actor.lora": {"targetModules": ["q", "q"]}}, 'lora.targetModules[1]: Duplicate value: "q"'),
    ({"ppo.clip": "0.2"}, 'spec.ppo.clip in body must be of type number: "string"'),
    ({"ppo.epochs": 1.5}, "spec.ppo.epochs in body must be of type int"),
    ({"ppo.advantage": "gea"}, 'spec.ppo.advantage: Unsupported value: "gea"'),
    ({"ppo.ema": 1.0}, "spec.ppo.ema in body should be less than 1"),
    ({"ppo.gamma": 1.5}, "spec.ppo.gamma in body should be less than or equal to 1"),
    ({"ppo.advantageFunction": "os.system"}, "spec.ppo.advantageFunction in body should match"),
    ({"ppo.loss": "pgo"}, "spec.ppo.loss in body should match"),
    ({"plan.parallelism": "Some"}, '"spec.plan.parallelism" must validate at least one schema'),
    ({"plan.interStageFusion": 1.2}, '"spec.plan.interStageFusion" must validate at least one schema'),
    ({"generation.stop": "END"}, "spec.generation.stop in body must be of type array"),
    ({"failurePolicy.maxRestarts": -1}, "spec.failurePolicy.maxRestarts in body should be greater than or equal to 0"),
]


@pytest.fixture(scope="module")
def server(api_server):
    install_crd(api_server)
    return api_server


@pytest.fixture(scope="module")
def dry_run(server):
    return DryRun(server)


@pytest.fixture
def namespace(server):
    with server.namespace() as name:
        yield name


def apply(server, manifest, namespace, *words):
    text = json.dumps(manifest)
    return server.try_kubectl("apply", "--server-side", "-n", namespace, "-f", "-", *words, stdin=text)


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(dry_run, path):
    manifest = yaml.safe_load(path.read_text())
    manifest["metadata"].pop("namespace", None)
    assert dry_run.create(manifest) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ppo.valueClip": None, "ppo.ema": None, "ppo.rewardClip": None},
        {"ppo.rewardClip": 2.5, "ppo.kl": {"in": "Loss", "estimator": "k2"}, "ppo.whitenAdvantages": False},
        {"ppo.kl": {"estimator": "k3"}, "ppo.advantage": "grpo", "ppo.samplesPerPrompt": 2},
        {"ppo.loss": "mine:loss", "ppo.importPath": "code"},
        {"plan.interStageFusion": 0.3},
        {"plan.interStageFusion": "Off"},
        {"plan.parallelism": {"actor": {"dp": 2}}},
        {"models.reward": {"function": "a:b"}, "data.preferences": []},
        {
            "models.reward": {"functions": [{"function": "a:b"}, {"function": "c:b", "name": "c"}]},
            "data.preferences": [],
        },
        {"groups.1.replicas": DELETE, "groups.1.minReplicas": 1, "groups.1.maxReplicas": 4},
        {"groups.1.podTemplate": {"spec": {"anything": [{"goes": 1}]}}, "models.actor.lora": {}},
        {"groups.1.podTemplate": {"spec": {"imagePullSecrets": [{"$patch": "replace"}], "x": None}}},
        {"groups.1.podTemplate": {"spec": {"initContainers": None}, "metadata": {"labels": {"a": "b"}}}},
    ],
    ids=str,
)
def test_what_dovetail_accepts_the_api_server_accepts(dry_run, changes):
    manifest = changed(**changes)
    parse_manifest(yaml.safe_dump(manifest))
    assert dry_run.create(manifest) == ""


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ({"containers": [{"image": "x"}]}, "containers[0].name: Required value"),
        ({"containers": [{"name": "dovetail", "env": [{"value": "x"}]}]}, "containers[0].env[0].name: Required value"),
        ({"volumes": [{"name": "a"}, {"emptyDir": {}}]}, "volumes[1].name: Required value"),
        ({"imagePullSecrets": [{}]}, "imagePullSecrets[0].name: Required value"),
    ],
    ids=str,
)
def test_an_item_of_a_pod_template_without_a_name_is_refused(dry_run, template, where):
    for field in ("groups.1", "coordinator"):
        refused = dry_run.create(changed(**{f"{field}.podTemplate": {"spec": template}}))
        assert f"podTemplate.spec.{where}" in refused, refused


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_defaults_are_those_of_dovetail(server, namespace, path):
    manifest = yaml.safe_load(path.read_text())
    manifest["metadata"].pop("namespace", None)
    assert create(server, manifest, "-n", namespace).returncode == 0
    stored = server.get("rlhfjob", manifest["metadata"]["name"], "-n", namespace)["spec"]
    ours = RLHFJob.model_validate(manifest).model_dump(mode="json", by_alias=True)["spec"]

    def same(theirs, mine, given, where):
        if isinstance(mine, dict) and where == "spec.plan.parallelism":
            return  # a union, which the API server takes as it is
        if isinstance(mine, dict):
            kept = {key: value for key, value in mine.items() if value is not None or key in theirs}
            assert set(theirs) == set(kept), where
            for key, value in kept.items():
                same(theirs[key], value, (given or {}).get(key), f"{where}.{key}")
        elif isinstance(mine, list) and given is not None:
            # A client that compares lists as a whole, such as Argo CD, must see no difference.
            assert theirs == given, where
        else:
            assert theirs == mine, where

    same(stored, ours, manifest["spec"], "spec")
    read = RLHFJob.model_validate({**manifest, "spec": stored}).spec
    assert read == RLHFJob.model_validate(manifest).spec, "what is not filled in is filled in when it is read"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("changes", "sentence"), TYPES, ids=[s[:60] for _, s in TYPES])
def test_types(dry_run, changes, sentence):
    assert sentence in dry_run.create(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(*case, id=case[1][:60], marks=() if number % 8 == 0 else pytest.mark.nightly)
        for number, case in enumerate(CASES)
    ],
)
def test_rules_say_what_dovetail_validate_says(dry_run, changes, sentence):
    """tests/unit/manifest/test_rules.py runs the same rules on far more manifests; here are the API server's own types,
    costs and messages."""
    manifest = changed(**changes)
    objects = Objects(RLHFJob.model_validate(manifest).spec)
    broken = [(rule, told) for rule in RULES for _, told in rule.check(objects)]
    assert [told for _, told in broken if sentence in told]
    refused = dry_run.create(manifest)
    assert bool(refused) == any(isinstance(rule.holds, str) or rule.by_type for rule, _ in broken)
    for rule, told in broken:
        if rule.by_type:
            assert "Duplicate value" in refused or "Required value" in refused
        elif isinstance(rule.holds, str):
            assert told in sentences(refused), refused


@pytest.mark.parametrize(
    ("name", "group", "most"),
    [("7up", "rollouts", 1), ("x" * 42, "rollouts", 1), ("x" * 41, "y" * 12, 1), ("x" * 41, "y" * 11, 11)],
)
def test_names_that_no_object_could_have_are_refused_in_one_sentence(dry_run, name, group, most):
    trainers, rollouts = GOOD["spec"]["groups"]
    rollouts = {key: value for key, value in rollouts.items() if "eplicas" not in key}
    manifest = {**GOOD, "metadata": {"name": name}}
    manifest["spec"] = GOOD["spec"] | {"groups": [trainers, rollouts | {"name": group, "maxReplicas": most}]}
    with pytest.raises(ManifestError) as error:
        parse_manifest(yaml.safe_dump(manifest))
    assert dry_run.create(manifest) == f"metadata.name: Invalid value: {error.value}"
    manifest["metadata"]["name"] = "up"
    assert dry_run.create(manifest) == ""


@pytest.mark.parametrize("name", ["a.b", "x" * 64])
def test_names_are_those_that_pods_can_have(dry_run, name):
    manifest = {**GOOD, "metadata": {"name": name}}
    with pytest.raises(ManifestError, match=r"metadata\.name"):
        parse_manifest(yaml.safe_dump(manifest))
    assert "metadata.name" in dry_run.create(manifest)


def test_unknown_fields_are_dropped_with_a_warning_where_kubectl_does_not_insist(server):
    manifest = changed(**{"ppo.miniBatchSze": 4})
    words = ("create", "--validate=warn", "--dry-run=server", "-o", "json", "-f", "-")
    done = server.try_kubectl(*words, stdin=json.dumps(manifest))
    assert done.returncode == 0
    assert 'unknown field "spec.ppo.miniBatchSze"' in done.stderr
    assert "miniBatchSze" not in done.stdout


# ---------------------------------------------------------------- what may change

FIXED = [
    ({"seed": 3}, "spec.seed"),
    ({"managedBy": "kueue.x-k8s.io/multikueue"}, "spec.managedBy"),
    ({"stages": ["sft"]}, "spec.stages"),
    ({"models.actor.source.scratch.config.num_hidden_layers": 4}, "spec.models"),
    ({"data.prompts.0.synthetic": {"size": 99}}, "spec.data"),
    ({"sft.epochs": 7}, "spec.sft"),
    ({"reward.optimizer": {"eps": 0.5}}, "spec.reward"),
    ({"ppo.kl": {"coef": 0.9}}, "spec.ppo, other than iterations,"),
    ({"generation.temperature": 0.5}, "spec.generation"),
    ({"plan.parallelism": {"actor": {"dp": 2}}}, "spec.plan"),
    ({"groups.2": {"name": "more", "roles": ["rollout"]}}, "The list of names in spec.groups"),
    ({"groups.1.name": "other"}, "The list of names in spec.groups"),
    ({"groups.1.roles": ["trainer", "rollout"]}, "roles of a group in spec.groups"),
    ({"groups.1.gpu": {"product": "x"}}, "gpu of a group in spec.groups"),
    ({"groups.1.dtype": "float32"}, "dtype of a group in spec.groups"),
    ({"groups.1.vllmArgs": ["--x"]}, "vllmArgs of a group in spec.groups"),
    ({"checkpoint.volume": "claim"}, "spec.checkpoint.volume"),
    ({"storage": {"folder": "other"}}, "spec.storage.folder"),
    ({"output": {"path": "/models"}}, "spec.output"),
]
FREE = [
    {"suspend": True},
    {"retry": 1},
    {"suspend": True, "groups.1.image": "x", "groups.1.preemptible": True, "groups.0.podTemplate": {"spec": {"x": 1}}},
    {"groups.1.replicas": 5},
    {"groups.1.minReplicas": 1, "groups.1.maxReplicas": 9},
    {"checkpoint.everySteps": 9, "checkpoint.keep": 9},
    {"failurePolicy.maxRestarts": 0},
    {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 0},
]


@pytest.fixture(scope="module")
def planned(server):
    """The namespace of a job with a plan."""
    with server.namespace() as name:
        assert create(server, GOOD, "-n", name).returncode == 0
        mark_planned(server, name, "job")
        yield name


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"groups.1.image": "x"}, "image of a group in spec.groups"),
        ({"groups.1.podTemplate": {"spec": {"x": 1}}}, "podTemplate of a group in spec.groups"),
        ({"groups.1.preemptible": True}, "preemptible of a group in spec.groups"),
        ({"groups.0.replicas": 4}, "replicas of a trainer group in spec.groups"),
        ({"coordinator": {"image": "x"}}, "spec.coordinator"),
        ({"coordinator": {"podTemplate": {"spec": {"x": 1}}}}, "spec.coordinator"),
        ({"hub": {"timeoutSeconds": 9}}, "spec.hub"),
        ({"ppo.iterations": 7}, "spec.ppo.iterations"),
    ],
    ids=str,
)
def test_what_a_job_cannot_change_while_it_may_run(dry_run, planned, changes, what):
    said = f"{what} cannot change while the job may run; set spec.suspend to true first."
    assert said in dry_run.apply(changed(**changes), planned)
    assert dry_run.apply(changed(suspend=True, **changes), planned) == ""


@pytest.mark.parametrize(("changes", "what"), FIXED, ids=[f"{w} {i}" for i, (_, w) in enumerate(FIXED)])
def test_what_a_planned_job_cannot_change(dry_run, planned, changes, what):
    refused = dry_run.apply(changed(**changes), planned)
    assert f"{what} cannot change once the job is planned; delete the job and create it anew." in refused


@pytest.mark.parametrize("changes", FREE, ids=str)
def test_what_may_change_at_any_time(dry_run, planned, changes):
    assert dry_run.apply(changed(**changes), planned) == ""


@pytest.mark.parametrize("status", [None, "False"])
def test_a_job_whose_plan_does_not_hold_can_be_corrected(server, namespace, status):
    assert create(server, GOOD, "-n", namespace).returncode == 0
    if status is not None:
        mark_planned(server, namespace, "job", status)
    done = apply(server, changed(**{"plan.parallelism": {"actor": {"dp": 2}}}), namespace, "--force-conflicts")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- appliers, versions


def test_appliers_conflict_by_field_and_share_a_group(server, namespace):
    assert apply(server, changed(seed=1), namespace, "--field-manager=ann").returncode == 0
    minimal = {k: GOOD[k] for k in ("apiVersion", "kind", "metadata")}
    scaled = {**minimal, "spec": {"groups": [{"name": "rollouts", "maxReplicas": 7, "roles": ["rollout"]}]}}
    assert apply(server, scaled, namespace, "--field-manager=scaler").returncode == 0, "groups are merged by name"
    spec = server.get("rlhfjob", "job", "-n", namespace)["spec"]
    assert [(g["name"], g.get("maxReplicas"), g["replicas"]) for g in spec["groups"]] == [
        ("trainers", None, 2),
        ("rollouts", 7, 2),
    ]
    reseeded = {**minimal, "spec": {"seed": 2, **scaled["spec"]}}
    done = apply(server, reseeded, namespace, "--field-manager=bob")
    assert done.returncode == 1
    assert 'conflict with "ann"' in done.stderr
    assert ".spec.seed" in done.stderr
    assert apply(server, reseeded, namespace, "--field-manager=bob", "--force-conflicts").returncode == 0
    assert server.get("rlhfjob", "job", "-n", namespace)["spec"]["seed"] == 2


def test_status_is_written_apart(server, namespace):
    assert create(server, {**GOOD, "status": {"stage": "ppo"}}, "-n", namespace).returncode == 0
    assert "status" not in server.get("rlhfjob", "job", "-n", namespace)
    mark_planned(server, namespace, "job")
    found = server.get("rlhfjob", "job", "-n", namespace)
    assert found["status"]["conditions"][0]["type"] == "Planned"
    assert found["metadata"]["generation"] == 1, "a status is no change of what is wanted"
    wrong = json.dumps({"status": {"conditions": [{"type": "Odd", "status": "Maybe"}]}})
    words = ("patch", "rlhfjob", "job", "-n", namespace, "--subresource=status", "--type=merge", "-p", wrong)
    done = server.try_kubectl(*words)
    assert done.returncode == 1
    assert 'Unsupported value: "Odd"' in done.stderr


def test_an_upgrade_from_an_older_definition_keeps_jobs(server):
    """The older one lacks fields and rules; a job of its time breaks a rule of today. (Such a job stays changeable
    where the API server can tell that spec is what it was: not with free-form fields in it.)"""
    older = yaml.safe_load(CRD.read_text())
    root = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def forget_rules(node):
        node.pop("x-kubernetes-validations", None)
        for inner in [*node.get("properties", {}).values(), *([node["items"]] if "items" in node else [])]:
            forget_rules(inner)

    forget_rules(root)
    del root["properties"]["spec"]["properties"]["ttlSecondsAfterFinished"]
    for version in older["spec"]["versions"]:
        del version["selectableFields"]
    odd = changed(**{"ppo.miniBatchSize": 48, "models": {"actor": {"source": {"path": "x"}}}})
    with server.namespace() as namespace:
        dry = ("-n", namespace, "--dry-run=server")
        try:
            install_crd(server, json.dumps(older))
            newer = changed(ttlSecondsAfterFinished=5)
            wait_for("the older rules", lambda: create(server, odd, *dry).returncode == 0)
            wait_for("the older fields", lambda: "unknown field" in create(server, newer, *dry).stderr)
            assert create(server, odd, "-n", namespace).returncode == 0
        finally:
            install_crd(server)
        wait_for("today's rules", lambda: create(server, odd | {"metadata": {"name": "new"}}, *dry).returncode == 1)
        server.kubectl("label", "rlhfjob", "job", "-n", namespace, "seen=yes")
        mark_planned(server, namespace, "job")
        assert server.get("rlhfjob", "job", "-n", namespace)["spec"]["ppo"]["miniBatchSize"] == 48


# ---------------------------------------------------------------- what people see


def test_names_columns_and_selectors(server, namespace):
    for name, suspended in (("one", False), ("two", True)):
        manifest = copy.deepcopy(changed(suspend=suspended))
        manifest["metadata"]["name"] = name
        assert create(server, manifest, "-n", namespace).returncode == 0
    mark_planned(server, namespace, "one")
    for word in ("rlhf", "rlhfjob", "rlhfjobs", "dovetail"):
        head, *rows = server.kubectl("get", word, "-n", namespace).splitlines()
        assert head.split() == [*("NAME", "STATE", "STAGE", "ITERATION", "REWARD", "SAMPLES/S", "AGE")]
        assert [row.split()[0] for row in rows] == ["one", "two"]
    wide = server.kubectl("get", "rlhf", "-n", namespace, "-o", "wide").splitlines()[0].split()
    assert {"KL", "RUNNING", "COMPLETED", "REASON", "SUSPENDED"} <= set(wide)
    words = ("get", "rlhf", "-n", namespace, "--field-selector", "spec.suspend=true", "-o", "name")
    # The definition of the test before had no such selector.
    wait_for("the selector", lambda: server.try_kubectl(*words).returncode == 0)
    assert server.kubectl(*words).split() == ["rlhfjob.dovetail.dev/two"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rlhfjob", "An RLHF training job: SFT, reward model and PPO from one manifest."),
        ("rlhfjob.spec.ppo.kl", "KL penalty against the reference."),
        ("rlhfjob.spec.groups.minReplicas", "Smallest number of rollout pods"),
        ("rlhfjob.status.conditions.message", "The root cause for people"),
    ],
)
def test_explain(server, path, text):
    assert text in " ".join(server.kubectl("explain", path).split())


def test_explain_describes_every_field(server):
    listing = server.kubectl("explain", "rlhfjob.spec", "--recursive")
    assert "globalBatchSize" in listing
    root = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def missing(node, path):
        for name, inner in node.get("properties", {}).items():
            if not inner.get("description") and path:
                yield f"{path}.{name}"
            yield from missing(inner, f"{path}.{name}")
        yield from missing(node.get("items", {}), f"{path}[]") if "items" in node else ()

    assert not [path for part in ("spec", "status") for path in missing(root["properties"][part], part)]
