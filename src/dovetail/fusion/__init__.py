"""The simulator of inter-stage fusion (RLHFuse section 4): generation whose tail gathers on few servers, and scoring
beside it. The planner predicts with it, and the coordinator of a running job chooses with it."""
