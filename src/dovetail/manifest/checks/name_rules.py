"""The rules about metadata.name. A name that passes works for all objects of the job.

Kubernetes makes the names of a job's pods from the job's name, the group's name and the pod's number, as in
`demo-train-0-3-x7k2p`. They may have 63 characters. JobSet requires that they begin with a letter."""

from __future__ import annotations

from dovetail.manifest.checks.cel import CelRule, as_seen, evaluate
from dovetail.manifest.fixed_names import COORDINATOR
from dovetail.manifest.types import RLHFJobSpec

LONGEST_POD_NAME = 63
# `-coordinator-0-0-12345` follows the job's name.
LONGEST_JOB_NAME = LONGEST_POD_NAME - len(f"-{COORDINATOR}-0-0-12345")
# `-`, `-0-` and `-12345` are around the names and the number.
LONGEST_TOGETHER = LONGEST_POD_NAME - len("--0--12345")

_LETTER = "metadata.name must begin with a letter, because JobSet's names must."
_JOB = f"metadata.name is too long; it may have {LONGEST_JOB_NAME} characters, because pod names are made of it."
_TOGETHER = (
    "metadata.name and the name of a group in spec.groups are too long together: they and the number of the group's "
    f"last pod may have {LONGEST_TOGETHER} characters, because pod names are made of them."
)
_PODS = "(has(g.maxReplicas) ? g.maxReplicas : has(g.replicas) ? g.replicas : has(g.minReplicas) ? g.minReplicas : 1)"
_READ = {"name", "replicas", "minReplicas", "maxReplicas"}
_DIGITS = f"({_PODS} <= 10 ? 1 : {_PODS} <= 100 ? 2 : {_PODS} <= 1000 ? 3 : 5)"
NAME_RULES = (
    CelRule("", "self.metadata.name.matches('^[a-z]')", _LETTER, ".metadata.name"),
    CelRule("", f"size(self.metadata.name) <= {LONGEST_JOB_NAME}", _JOB, ".metadata.name"),
    CelRule(
        "",
        f"self.spec.groups.all(g, size(self.metadata.name) + size(g.name) + {_DIGITS} <= {LONGEST_TOGETHER})",
        _TOGETHER,
        ".metadata.name",
    ),
)


def check_name(name: str, spec: RLHFJobSpec) -> list[str]:
    """One sentence for each rule that the job's name breaks. [] if it breaks none."""
    groups = [{key: value for key, value in each.items() if key in _READ} for each in map(as_seen, spec.groups)]
    job = {"metadata": {"name": name}, "spec": {"groups": groups}}
    return [rule.message for rule in NAME_RULES if not evaluate(rule.rule, job)]
