"""Memory of one GPU by part: training ranks, vLLM servers, scorers (APP's MinResourceChecker and more)."""

from dovetail.planner.memory.fit import problem, worst
from dovetail.planner.memory.parts import Memory, explain
from dovetail.planner.memory.rollout import Server, kv_tokens, rollout_memory, scorer_memory
from dovetail.planner.memory.training import Training, training_memory

__all__ = [
    "Memory",
    "Server",
    "Training",
    "explain",
    "kv_tokens",
    "problem",
    "rollout_memory",
    "scorer_memory",
    "training_memory",
    "worst",
]
