"""The Helm chart: rendered, checked against Kubernetes' schemas and its own, its alerts tried on made-up metrics."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from dovetail.coordinator.reporting.telemetry import CoordinatorMetrics
from dovetail.kube import names
from dovetail.kube.resources import CHILDREN
from dovetail.operator.cluster.leader import LEASE
from dovetail.operator.cluster.tokens import KEY_SECRET
from dovetail.operator.operator_metrics import OperatorMetrics
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.render.objects import SUPPORTING
from dovetail.statusapi.api_settings import ApiSettings
from dovetail.statusapi.app import ApiMetrics
from helpers.chart_tools import CHART, binaries, kubernetes_schemas, run, template, tool

SCHEMAS = CHART.parents[1] / "docs" / "schema"
EVERYTHING = [
    *("--set", "namespaces={a,b}", "--set", "api.tlsSecret=web", "--set", "images.pullSecrets={pull}"),
    *("--set", "jobs.podTemplate.spec.nodeSelector.disk=fast", "--set", "monitoring.monitors=Always"),
    *("--set", "monitoring.rules=Always", "--set", "networkPolicy.apiFrom[0].podSelector.matchLabels.a=b"),
    *("--set-string", "operator.podAnnotations.note=1", "--set", "commonLabels.team=ml"),
]


@pytest.fixture(scope="module")
def rendered():
    return [document for document in yaml.safe_load_all(template()) if document]


@pytest.fixture(scope="module")
def everything():
    return [document for document in yaml.safe_load_all(template(*EVERYTHING)) if document]


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def test_lint():
    done = run(tool("helm"), "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_unittests():
    done = run(tool("helm-unittest"), "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], EVERYTHING], ids=["defaults", "everything"])
def test_kubeconform(tmp_path, words):
    kubeconform, location = tool("kubeconform"), kubernetes_schemas(tmp_path)
    shutil.copy(SCHEMAS / "rlhfjob.schema.json", tmp_path / "rlhfjob-dovetail-v1beta1.json")
    examples = [p.read_text() for p in sorted((CHART.parents[1] / "examples").glob("*.yaml"))]
    text = "\n---\n".join([template(*words), *examples])
    # The Prometheus operator's kinds are checked by the cluster that has them.
    skip = "PodMonitor,ServiceMonitor,PrometheusRule"
    options = ("-strict", "-summary", "-output", "json", "-skip", skip, "-schema-location", location)
    done = run(kubeconform, *options, input=text)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["resources"]
    assert found["summary"]["valid"] > 15
    # One document has one schema to read. It is enough to see that unknown fields are found.
    budget = next(part for part in text.split("\n---\n") if "maxUnavailable: 1\n  unhealthy" in part)
    assert run(kubeconform, *options, input=budget).returncode == 0
    assert run(kubeconform, *options, input=budget.replace("maxUnavailable", "maxUnavailabel")).returncode == 1


@pytest.mark.slow
def test_the_crds_are_the_generated_ones():
    found = of_kind(yaml.safe_load_all(template()), "CustomResourceDefinition")
    assert [each["spec"]["names"]["kind"] for each in found] == ["RLHFJobClass", "RLHFJob"]
    for each in found:
        generated = yaml.safe_load((CHART / f"files/crds/{each['metadata']['name']}.yaml").read_text())
        assert each["spec"] == generated["spec"]


def test_every_variable_of_the_pods_is_a_setting(everything):
    for deployment, settings, prefix in (
        ("dovetail-operator", OperatorSettings, "DOVETAIL_"),
        ("dovetail-api", ApiSettings, "DOVETAIL_API_"),
    ):
        (found,) = [d for d in of_kind(everything, "Deployment") if d["metadata"]["name"] == deployment]
        (container,) = found["spec"]["template"]["spec"]["containers"]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert {name.removeprefix(prefix).lower() for name in variables} <= set(settings.__dataclass_fields__)
        given = {k: v for k, v in variables.items() if v is not None and k != "DOVETAIL_POD_TEMPLATE"}
        read = settings.read(given)
        assert read.namespaces == ("a", "b")
        port = container["ports"][0]["containerPort"]
        assert port == (read.health_port if settings is OperatorSettings else read.port)


def test_names_that_chart_and_program_share(rendered, everything):
    (role,) = [r for r in of_kind(rendered, "Role") if r["metadata"]["name"] == "dovetail-leader"]
    assert [rule.get("resourceNames") for rule in role["rules"]] == [[LEASE], None, [KEY_SECRET]]
    (jobs,) = [m for m in of_kind(everything, "PodMonitor") if m["metadata"]["name"] == "dovetail-jobs"]
    assert jobs["spec"]["selector"]["matchExpressions"] == [{"key": names.JOB_LABEL, "operator": "Exists"}]
    sources = [r["sourceLabels"][0] for r in jobs["spec"]["podMetricsEndpoints"][0]["relabelings"]]
    labels = (names.JOB_LABEL, names.GROUP_LABEL, names.ROLE_LABEL)
    assert sources == ["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label) for label in labels]


def test_the_operator_has_rights_on_every_kind_that_jobs_own(rendered):
    """tests/cluster/test_rbac.py asks an API server for all rights. A new kind without any fails here already."""
    allowed = {
        (group, plural, verb)
        for role in of_kind(rendered, "ClusterRole")
        if role["metadata"]["name"].endswith("operator")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
    }
    missing = [
        f"{resource.kind}: {verb}"
        for resource in CHILDREN
        for verb in ("list", "watch", *(("create", "patch") if resource.kind in SUPPORTING else ()))
        if (resource.group, resource.plural, verb) not in allowed
    ]
    assert missing == [], "give them in helm/dovetail/templates/operator-rbac.yaml"


def test_pods_meet_the_restricted_standard(rendered):
    for deployment in of_kind(rendered, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_schema_for_every_value():
    """Every value of values.yaml is in the schema, and nothing else may be set."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(node, value, path):
        node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if "properties" in node:
            assert node["additionalProperties"] is False, path
            for key, inner in value.items():
                assert key in node["properties"], f"{path}.{key}"
                check(node["properties"][key], inner, f"{path}.{key}")

    check(schema, values, "")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("operator.replica=3", "additional properties 'replica' not allowed"),
        ("operator.replicas=many", "got string, want integer"),
        ("images.operator.digest=sha256:1", "does not match pattern"),
        ("monitoring.rules=Yes", "value must be one of"),
        ("namespaces={A_b}", "does not match pattern"),
        ("jobs.volume.accessMode=Many", "value must be one of"),
        ("monitoring.interval=soon", "does not match pattern"),
        ("jobs.podTemplate.containers=x", "additional properties 'containers' not allowed"),
    ],
)
def test_values_that_are_refused(value, sentence):
    done = run(tool("helm"), "template", "x", str(CHART), "--set", value)
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_jobset_comes_along_if_wanted(tmp_path, enabled):
    """The umbrella chart, with what `helm dependency build` would fetch."""
    if shutil.which("go") is None:
        pytest.skip("there is no Go to fetch JobSet's chart with")
    shutil.copytree(CHART.parent / "dovetail-jobset", tmp_path / "both", ignore=shutil.ignore_patterns("charts"))
    shutil.copytree(CHART, tmp_path / "both" / "charts" / "dovetail")
    jobset = binaries.module_folder("jobset", "sigs.k8s.io/jobset") / "charts" / "jobset"
    shutil.copytree(jobset, tmp_path / "both" / "charts" / "jobset")
    done = run(tool("helm"), "template", "x", str(tmp_path / "both"), "--set", f"jobset.enabled={str(enabled).lower()}")
    assert done.returncode == 0, done.stderr
    found = {d["metadata"]["name"] for d in of_kind(filter(None, yaml.safe_load_all(done.stdout)), "Deployment")}
    assert {"x-dovetail-operator", "x-dovetail-api"} <= found
    assert any("jobset" in name for name in found) == enabled


# ---------------------------------------------------------------- metrics


def known_metrics() -> set[str]:
    """Names of all samples that our processes can give."""
    coordinator, api, operator = CollectorRegistry(), CollectorRegistry(), OperatorMetrics().registry
    CoordinatorMetrics(coordinator)
    ApiMetrics(None, registry=api)  # type: ignore[arg-type]
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {
        metric.name + suffix
        for registry in (coordinator, api, operator)
        for metric in registry.collect()
        for suffix in suffixes[metric.type]
    }


def expressions(document):
    """Every PromQL expression of rules and dashboards."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "expr" or (key == "query" and isinstance(value, str)):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(document, list):
        for item in document:
            yield from expressions(item)


RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))


@pytest.mark.parametrize("path", [RULES, *DASHBOARDS], ids=lambda path: path.name)
def test_alerts_and_dashboards_read_metrics_that_exist(path: Path):
    document = yaml.safe_load(path.read_text())
    found = [name for text in expressions(document) for name in re.findall(r"\bdovetail_\w+", text)]
    assert found
    assert set(found) <= known_metrics()


def test_dashboards_are_sound():
    assert {path.stem for path in DASHBOARDS} == {"fleet", "jobs", "operator"}
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        cells = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not mine & cells, f"{panel['title']} covers another panel"
            cells |= mine
            assert at["x"] + at["w"] <= 24
            assert panel["datasource"]["uid"] == "${datasource}"


SCRAPED = ("--set-json", 'networkPolicy.metricsFrom=[{"namespaceSelector":{}}]')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "absent"), [((), False), (SCRAPED, True), (("--set", "networkPolicy.enabled=false"), True)]
)
def test_metrics_that_nobody_may_read_raise_no_alarm(words, absent):
    (rule,) = of_kind(yaml.safe_load_all(template("--set", "monitoring.rules=Always", *words)), "PrometheusRule")
    alerts = {each["alert"]: each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]}
    expression = alerts["DovetailOperatorNotLeading"]
    assert 'namespace="dovetail-system"' in expression, "of this release"
    assert ("vector(0)" in expression) is absent


@pytest.mark.slow
def test_alerts(tmp_path):
    promtool = tool("promtool")
    (rule,) = of_kind(yaml.safe_load_all(template("--set", "monitoring.rules=Always", *SCRAPED)), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    shutil.copy(Path(__file__).with_name("chart_rules.yaml"), tmp_path)
    checked = run(promtool, "check", "rules", "rules.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    done = run(promtool, "test", "rules", "chart_rules.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested():
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    cases = yaml.safe_load(Path(__file__).with_name("chart_rules.yaml").read_text())["tests"]
    fired = {rule["alertname"] for case in cases for rule in case["alert_rule_test"] if rule["exp_alerts"]}
    assert alerts == fired


def test_alerts_name_the_job_a_remedy_and_a_page():
    runbooks = (CHART.parents[1] / "docs" / "runbooks.md").read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert {"summary", "description", "runbook"} == set(rule["annotations"])
            assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
            assert f"\n## {rule['alert']}\n" in runbooks
            assert rule["annotations"]["summary"].endswith(".")


def test_the_readme_lists_every_value():
    page = (CHART / "README.md").read_text()
    for top in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert f"| `{top}" in page
