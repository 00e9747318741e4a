"""Simulates inter-stage fusion (RLHFuse section 4): when the last samples of generation migrate, where to, and how much
time that saves.

    controller = ThresholdController(setting, max_tokens)       # one per job; setting as in plan.interStageFusion
    decision = controller.decide(prompt_lengths, profiles)      # before an iteration; profiles: one per rollout
    ...                                                         # at decision.threshold remaining samples:
    plan = plan_migration(unfinished, profiles_by_name, kv_per_sample)
    controller.observe(response_lengths)                        # after the iteration

`decision.prediction` is the prediction of `scan` for the stage. A threshold is a number of unfinished samples. With 0
no sample migrates, but an instance scores once it has nothing left to generate. With None inference begins when
generation has ended. A run measures its profiles (`dovetail.coordinator.fusion.measurements`). Times are seconds and
lengths are tokens. Everything is deterministic."""

from dovetail.planner.simulate.controller import Decision, ThresholdController
from dovetail.planner.simulate.migration import MigrationPlan, plan_migration
from dovetail.planner.simulate.profile import ProfileError, StageProfile
from dovetail.planner.simulate.stage import StagePrediction, scan

__all__ = [
    "Decision",
    "MigrationPlan",
    "ProfileError",
    "StagePrediction",
    "StageProfile",
    "ThresholdController",
    "plan_migration",
    "scan",
]
