"""Says which parts of a job's spec may change, as CEL transition rules.

At any time a user may suspend and resume a job, scale its rollout groups, and let a failed job try again. The user may
also change its deadlines, its failure policy, its checkpoint policy and which samples are kept as text, and may decide
to keep its claim. Images, pod templates, the access to a hub and the number of trainers may change while the job is
suspended. Everything else decides what is trained. It is fixed when the job has a plan (condition Planned=True). Before
that it may be corrected, for example while Planned=False says what does not fit."""

from __future__ import annotations

from dovetail.manifest.checks.cel import CelRule

# Every field of spec is in one of the three lists. tests/unit/manifest/test_crd_rules.py checks this.
FIXED_IF_SET = ("managedBy",)
FIXED = (
    "seed",
    "stages",
    "models",
    "data",
    "sft",
    "reward",
    "dpo",
    "ppo",
    "generation",
    "evaluation",
    "plan",
    "trainer",
)
CHANGEABLE = (
    "suspend",
    "retry",
    "groups",
    "checkpoint",
    "storage",
    "output",
    "failurePolicy",
    "samples",
    "trackers",
    "coordinator",
    "hub",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
)

_UNPLANNED = "!has(oldSelf.status) || !oldSelf.status.conditions.exists(c, c.type == 'Planned' && c.status == 'True')"
_AGAIN = "cannot change once the job is planned; delete the job and create it anew"


_SUSPENDED = "cannot change while the job may run; set spec.suspend to true first"


def _rule(changed: str, same: str, field: str) -> CelRule:
    return CelRule("", f"{_UNPLANNED} || {same}", f"{changed} {_AGAIN}.", field)


def _same(values: str) -> str:
    """Whether `values`, an expression of `groups`, is the same before and after."""
    now, before = (values.replace("groups", f"{side}.spec.groups") for side in ("self", "oldSelf"))
    return f"{now} == {before}"


_GROUP_FIELDS = {
    "roles": "g.roles",
    "gpu": "g.gpu",
    "dtype": "g.dtype",
    "vllmArgs": "g.vllmArgs",
}
_POD_FIELDS = {
    "image of a group": "groups.map(g, has(g.image) ? g.image : '')",
    "podTemplate of a group": "groups.map(g, g.podTemplate)",
    "preemptible of a group": "groups.map(g, g.preemptible)",
    "replicas of a trainer group": "groups.filter(g, 'trainer' in g.roles).map(g, has(g.replicas) ? g.replicas : 1)",
}

_SIDES = ("self.spec.coordinator", "oldSelf.spec.coordinator")
_COORDINATOR = " && ".join(
    " == ".join(value.format(side) for side in _SIDES)
    for value in ("(has({0}.image) ? {0}.image : '')", "{0}.podTemplate")
)

TRANSITION_RULES: tuple[CelRule, ...] = (
    *(
        _rule(
            f"spec.{name}",
            f"(has(self.spec.{name}) ? self.spec.{name} : '') == (has(oldSelf.spec.{name}) ? oldSelf.spec.{name} : '')",
            f".spec.{name}",
        )
        for name in FIXED_IF_SET
    ),
    *(_rule(f"spec.{name}", f"self.spec.{name} == oldSelf.spec.{name}", f".spec.{name}") for name in FIXED),
    _rule("The list of names in spec.groups", _same("groups.map(g, g.name)"), ".spec.groups"),
    *(
        _rule(f"{name} of a group in spec.groups", _same(f"groups.map(g, {value})"), ".spec.groups")
        for name, value in _GROUP_FIELDS.items()
    ),
    *(
        CelRule(
            "",
            f"{_UNPLANNED} || self.spec.suspend || {_same(value)}",
            f"{name} in spec.groups {_SUSPENDED}.",
            ".spec.groups",
        )
        for name, value in _POD_FIELDS.items()
    ),
    *(
        CelRule(
            "",
            f"{_UNPLANNED} || self.spec.suspend || {same}",
            f"spec.{name} {_SUSPENDED}.",
            f".spec.{name}",
        )
        for name, same in {
            "coordinator": f"({_COORDINATOR})",
            "hub": "self.spec.hub == oldSelf.spec.hub",
            "trackers": "self.spec.trackers == oldSelf.spec.trackers",
        }.items()
    ),
    _rule(
        "spec.checkpoint.volume",
        "(has(self.spec.checkpoint.volume) ? self.spec.checkpoint.volume : '') "
        "== (has(oldSelf.spec.checkpoint.volume) ? oldSelf.spec.checkpoint.volume : '')",
        ".spec.checkpoint.volume",
    ),
    _rule(
        "spec.storage.folder",
        "(has(self.spec.storage.folder) ? self.spec.storage.folder : '') "
        "== (has(oldSelf.spec.storage.folder) ? oldSelf.spec.storage.folder : '')",
        ".spec.storage.folder",
    ),
    _rule(
        "spec.output",
        "has(self.spec.output) == has(oldSelf.spec.output) "
        "&& (!has(self.spec.output) || self.spec.output == oldSelf.spec.output)",
        ".spec.output",
    ),
    CelRule(
        "",
        f"{_UNPLANNED} || self.spec.storage.retain == oldSelf.spec.storage.retain "
        "|| self.spec.storage.retain == 'Keep'",
        "spec.storage.retain cannot change to Delete once the job is planned; delete the claim when the job is gone.",
        ".spec.storage.retain",
    ),
)
