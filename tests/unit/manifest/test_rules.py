"""The table of rules: what `dovetail validate` says, what the CRD has the API server say, and what readers see."""

from collections import Counter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.checks.cel import evaluate
from dovetail.manifest.checks.rules import CEL_RULES, RULES, check
from dovetail.manifest.checks.rules.rule import Objects
from dovetail.manifest.checks.validation import parse_manifest
from dovetail.manifest.documents import ManifestError
from dovetail.manifest.field_policy import parts
from dovetail.manifest.types import RLHFJob, RLHFJobSpec
from helpers.manifests import GOOD, changed
from helpers.manifests import RULES as CASES
from helpers.random_manifests import random_spec


def by_the_crd(spec):
    """What the entries of the CRD say of a spec: `path|message` for each object that breaks one."""
    objects, told = Objects(spec), Counter()
    for rule in CEL_RULES:
        for path, _, seen in objects.at(rule.path):
            if not evaluate(rule.rule, seen):
                entry = rule.schema()
                message = (
                    evaluate(entry["messageExpression"], seen) if "messageExpression" in entry else entry["message"]
                )
                told[f"{path}|{message}"] += 1
    return told


def by_the_table(spec):
    """The API server puts the path of an item before the sentence itself."""
    objects = Objects(spec)
    return Counter(
        f"{path}|{sentence.removeprefix(path).lstrip('.: ') if '[' in path else sentence}"
        for rule in RULES
        if isinstance(rule.holds, str)
        for path, sentence in rule.check(objects)
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_rule_in_cel_fails_to_be_evaluated(seed):
    """Such a rule would hold here for every manifest, and the API server would refuse every manifest for it."""
    objects = Objects(random_spec(seed))
    for rule in RULES:
        for found in [found for place in rule.at for found in objects.at(place)] if isinstance(rule.holds, str) else []:
            assert evaluate(rule.holds, found.seen) in (True, False), rule.sentence


CASE_SPECS = [RLHFJob.model_validate(changed(**changes)).spec for changes, _ in CASES]


@pytest.mark.parametrize("spec", CASE_SPECS)
def test_the_crd_says_the_same_of_manifests_that_break_one_rule(spec):
    assert by_the_crd(spec) == by_the_table(spec)


def test_a_number_that_the_api_server_cannot_hold_is_refused():
    spec = RLHFJob.model_validate(changed(**{"ppo.iterations": 10**30})).spec
    assert check(spec) == [f"spec.ppo.iterations must be below 2^63; it is {10**30}."]
    with pytest.raises(ManifestError, match=r"spec.ppo.iterations must be below 2\^63"):
        parse_manifest(yaml.safe_dump(changed(**{"ppo.iterations": 10**30})))


def test_a_sentence_about_a_part_of_another_form_is_still_told():
    template = {"spec": {"volumes": [{"name": "files", "emptyDir": {}}, "x"]}}
    spec = RLHFJob.model_validate(changed(**{"groups.0.podTemplate": template})).spec
    assert any("volume" in sentence for sentence in check(spec))


def test_of_a_group_only_the_number_of_pods_may_change_at_any_time():
    """A new field of a group would otherwise change under running pods."""
    free = {path for path, when in parts(RLHFJobSpec, lambda policy: policy.planned) if when == "always"}
    of_groups = {path.removeprefix("groups[].") for path in free if path.startswith("groups")}
    assert of_groups == {"replicas", "minReplicas", "maxReplicas"}


def test_every_rule_is_broken_by_a_manifest_of_the_tests():
    cases = [Objects(spec) for spec in CASE_SPECS]
    assert [rule.sentence for rule in RULES if not any(any(True for _ in rule.check(case)) for case in cases)] == []


def test_no_sentence_is_in_the_table_twice():
    sentences = Counter(rule.sentence for rule in RULES)
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def test_a_good_manifest_breaks_no_rule():
    assert check(RLHFJob.model_validate(GOOD).spec) == []
