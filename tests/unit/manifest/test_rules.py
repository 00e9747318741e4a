"""The table of rules: what its rows say in Python, in CEL and to readers is the same."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.manifest.checks.rules import CEL_RULES, RULES, check
from dovetail.manifest.checks.rules.rule import Objects
from dovetail.manifest.types import RLHFJob
from helpers.cel import refused
from helpers.manifests import GOOD, changed
from helpers.manifests import RULES as CASES
from helpers.random_manifests import random_spec


def in_python(spec):
    """The API server puts the path of an item before the sentence itself."""
    objects = Objects(spec)
    return Counter(
        f"{path}|{sentence.removeprefix(path).lstrip('.: ') if '[' in path else sentence}"
        for rule in RULES
        if rule.cel is not None
        for path, sentence in rule.check(objects)
    )


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32))
def test_both_predicates_agree_on_any_manifest_and_say_the_same(seed):
    spec = random_spec(seed)
    assert Counter(refused(CEL_RULES, spec)) == in_python(spec)


CASE_SPECS = [RLHFJob.model_validate(changed(**changes)).spec for changes, _ in CASES]


@pytest.mark.parametrize("spec", CASE_SPECS)
def test_both_predicates_agree_on_manifests_that_break_one_rule(spec):
    assert Counter(refused(CEL_RULES, spec)) == in_python(spec)


def test_every_rule_is_broken_by_a_manifest_of_the_tests():
    broken = {rule.sentence for spec in CASE_SPECS for rule in RULES if list(rule.check(Objects(spec)))}
    assert [rule.sentence for rule in RULES if rule.sentence not in broken] == []


def test_no_sentence_is_in_the_table_twice():
    sentences = Counter(rule.sentence for rule in RULES)
    assert [sentence for sentence, count in sentences.items() if count > 1] == []


def test_a_good_manifest_breaks_no_rule():
    assert check(RLHFJob.model_validate(GOOD).spec) == []
