"""What a machine with two cores costs, for tests of predictions."""

from dovetail.protocol.files.machine_profile import Cost, GenerationCosts, Machine, ScoringCosts, TrainingCosts

MACHINE = Machine(
    cores=2,
    generation=GenerationCosts(begin=0.02, sample=0.004, step=0.006, token=0.0004, cores=1.4),
    scoring=ScoringCosts(
        begin=0.02,
        batch=0.02,
        token={"reference": 1e-4, "reward": 1e-4, "critic": 1e-4},
        cores=1.2,
    ),
    training=TrainingCosts(
        begin=0.03,
        step=0.02,
        exchange=0.01,
        message=0.002,
        models={"actor": Cost(fixed=0.01, each=2e-4), "critic": Cost(fixed=0.009, each=1.8e-4)},
        cores=1.3,
        straggling=0.05,
    ),
    weights=Cost(fixed=0.05, each=0.05),
    other=Cost(fixed=0.01, each=1e-4),
    prompt_tokens=16.0,
    end_rate=0.05,
)
