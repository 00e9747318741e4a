"""A taskset of verifiers: sums, which one agent answers in one turn."""

import verifiers.v1 as vf

__all__ = ["Arithmetic"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class Arithmetic(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 10):
            yield SumTask(Sum(prompt=f"What is {a} + {a}? Answer with the number only.", answer=str(2 * a)))
