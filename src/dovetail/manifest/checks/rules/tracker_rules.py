"""Rules about trackers."""

from __future__ import annotations

from dovetail.manifest.checks.rules.rule import Rule

TRACKER_RULES = (
    Rule(
        ("spec.trackers",),
        "self.all(t, self.exists_one(u, u.kind == t.kind))",
        "{path} names a kind twice; keep one of each.",
    ),
)
