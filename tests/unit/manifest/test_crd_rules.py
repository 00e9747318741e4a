"""The CRD's CEL rules as data; tests/cluster/test_crd.py has a real API server judge them."""

import re

import pytest

from dovetail.manifest.checks.cel import CelRule, as_seen, evaluate
from dovetail.manifest.checks.immutable import TRANSITION_RULES
from dovetail.manifest.checks.name_rules import NAME_RULES
from dovetail.manifest.checks.rules import CEL_RULES
from dovetail.manifest.describe.crd import crd
from dovetail.manifest.types import RLHFJobSpec
from helpers.fake_cluster import manifest

VERSION = crd()["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]


def validations(node=ROOT, path=""):
    for rule in node.get("x-kubernetes-validations", []):
        yield path, rule
    for name, inner in node.get("properties", {}).items():
        yield from validations(inner, f"{path}.{name}")
    if "items" in node:
        yield from validations(node["items"], f"{path}[]")


def transition_rules(field):
    return [rule.message for rule in TRANSITION_RULES if rule.field == field]


def test_policies_become_transition_rules():
    again = "cannot change once the job is planned; delete the job and create it anew."
    suspended = "cannot change while the job may run; set spec.suspend to true first."
    assert transition_rules(".spec.sft") == [f"spec.sft {again}"]
    assert transition_rules(".spec.ppo") == [f"spec.ppo, other than iterations, {again}"]
    assert f"spec.ppo.iterations {suspended}" in transition_rules(".spec.ppo.iterations")
    assert transition_rules(".spec.output") == [f"spec.output {again}"]
    assert transition_rules(".spec.checkpoint.volume") == [f"spec.checkpoint.volume {again}"]
    assert transition_rules(".spec.hub") == [f"spec.hub {suspended}"]
    for free in ("suspend", "retry", "samples", "failurePolicy", "checkpoint", "checkpoint.keep", "storage"):
        assert transition_rules(f".spec.{free}") == []
    assert sorted(transition_rules(".spec.groups")) == sorted(
        [
            f"The list of names in spec.groups {again}",
            f"replicas of a trainer group in spec.groups {suspended}",
            *(f"{name} of a group in spec.groups {again}" for name in ("roles", "gpu", "dtype", "vllmArgs")),
            *(f"{name} of a group in spec.groups {suspended}" for name in ("image", "preemptible", "podTemplate")),
        ]
    )


def test_only_transition_rules_look_back():
    assert not any("oldSelf" in rule.rule for rule in CEL_RULES)
    for rule in TRANSITION_RULES:
        assert rule.rule.startswith("!has(oldSelf.status) || "), "a job that is not planned may be corrected"


def refused(before, planned="AsPlanned", stage="ppo", done=3, **after):
    """The sentences for a change of a job: one that runs, or one whose plan or first stage is missing."""
    condition = {"type": "Planned", "status": str(planned == "AsPlanned"), "reason": planned}
    status = {"conditions": [condition]} | ({"stage": stage, "iteration": done} if stage else {})
    sides = {
        name: {"status": status, "spec": as_seen(RLHFJobSpec.model_validate(spec))}
        for name, spec in (("oldSelf", before), ("self", before | after))
    }
    rules = [(re.sub(r"\b(self|oldSelf)\.", r"self.\1.", rule.rule), rule.message) for rule in TRANSITION_RULES]
    return [message for rule, message in rules if not evaluate(rule, sides)]


def test_a_job_that_began_stays_fixed_while_it_cannot_be_planned_anew():
    """Its checkpoint is that of the old fields."""
    spec = manifest()["spec"]
    changed = spec["ppo"] | {"iterations": 7}
    assert refused(spec, planned="PlanInfeasible", stage=None, ppo=changed) == [], "it may still be corrected"
    assert refused(spec, planned="InvalidSpec", ppo=changed) == [], "a later release refuses what it had"
    assert len(refused(spec, planned="PlanInfeasible", ppo=changed)) == 1
    assert len(refused(spec, stage=None, ppo=changed)) == 1


def test_the_number_of_trainers_may_change_while_the_job_is_suspended():
    spec = manifest()["spec"]
    train, gen = spec["groups"]
    more = [train | {"replicas": 3}, gen]
    assert refused(spec) == []
    assert refused(spec, groups=[train, gen | {"maxReplicas": 5}]) == []
    sentence = (
        "replicas of a trainer group in spec.groups cannot change while the job may run; set spec.suspend to true"
    )
    assert refused(spec, groups=more) == [f"{sentence} first."]
    assert refused(spec, groups=more, suspend=True) == []
    assert refused(spec | {"suspend": True}, groups=more, suspend=False) == [f"{sentence} first."]
    (sentence,) = refused(spec, seed=5, suspend=True)
    assert sentence.startswith("spec.seed cannot change once the job is planned")


def test_the_number_of_iterations_may_change_while_the_job_is_suspended():
    spec = manifest()["spec"]
    longer, shorter = ({"ppo": spec["ppo"] | {"iterations": number}} for number in (40, 4))
    (sentence,) = refused(spec, **longer)
    assert sentence.startswith("spec.ppo.iterations cannot change while the job may run; set spec.suspend to true")
    assert refused(spec, **longer, suspend=True) == []
    assert refused(spec, **shorter, suspend=True, done=4) == []
    lower = ["spec.ppo.iterations cannot be lower than the number of finished iterations."]
    assert refused(spec, **shorter, suspend=True, done=5) == lower
    assert refused(spec, **shorter, suspend=True, done=200, stage="sft") == []
    assert refused(spec | shorter, done=5) == [], "a loop of one's own may run more"
    (sentence,) = refused(spec, suspend=True, ppo=longer["ppo"] | {"epochs": 3})
    assert sentence.startswith("spec.ppo, other than iterations, cannot change once the job is planned")


def test_a_sentence_with_values_becomes_an_expression():
    rule = CelRule("spec", "true", "it's {self.a}% of {self.b ? 'x' : 'y'}, {vocabSize: 1}.")
    assert rule.schema() == {
        "rule": "true",
        "messageExpression": r"'it\'s %s%% of %s, {vocabSize: 1}.'.format([self.a, self.b ? 'x' : 'y'])",
    }


@pytest.mark.parametrize("rule", CEL_RULES, ids=lambda rule: f"{rule.path} {rule.message[:40]}")
def test_sentences_name_the_field_and_are_whole(rule):
    assert rule.message.endswith(".")
    if "[]" not in rule.path:
        assert rule.message.startswith("spec.")


def test_all_rules_are_in_the_schema():
    found = list(validations())
    assert len(found) == len(NAME_RULES) + len(CEL_RULES) + len(TRANSITION_RULES)
    assert all(("message" in rule) != ("messageExpression" in rule) for _, rule in found)


def node_at(path):
    node = ROOT
    for name in path.removeprefix(".").split("."):
        node = node["properties"][name.removesuffix("[]")]
        node = node["items"] if name.endswith("[]") else node
    return node


COMPARED = r"\bself((?:\.\w+)+) *(?:[=!<>]=|[<>]) *(-?\d+(?:\.\d+)?(?:e-?\d+)?)"


def compared_fields():
    """Each field of `self` that a rule compares with a number: its rule, its schema's type and the number."""
    for path, rule in validations():
        for names, number in re.findall(COMPARED, rule["rule"]):
            node = node_at(path)
            for name in names.removeprefix(".").split("."):
                node = node["properties"].get(name, {}) if "properties" in node else {}
            yield rule["rule"], node.get("type"), number


def test_a_field_is_compared_with_a_number_of_its_own_type():
    """The API server refuses the whole CRD otherwise: CEL compares no double with an int."""
    found = list(compared_fields())
    assert {type_ for _, type_, _ in found} >= {"number", "integer"}
    for rule, type_, number in found:
        if type_ in ("number", "integer"):
            assert any(mark in number for mark in ".e") == (type_ == "number"), rule


def test_what_kubectl_needs():
    assert VERSION["subresources"] == {"status": {}}
    assert {field["jsonPath"] for field in VERSION["selectableFields"]} == {".spec.suspend", ".status.stage"}
    conditions = [c["jsonPath"] for c in VERSION["additionalPrinterColumns"] if "conditions" in c["jsonPath"]]
    assert conditions
    assert all('?(@.type=="' in path for path in conditions), "by name: the order of conditions is not fixed"
    assert ROOT["properties"]["metadata"]["properties"]["name"]["maxLength"] == 63
