"""Calls the reward functions on two of the job's prompts before training. So a broken function fails within seconds."""

from __future__ import annotations

from itertools import cycle, islice

from dovetail.coordinator.data.prepare import Prepared
from dovetail.coordinator.rewards.calls import Call, Calls, fields_of

PROMPTS = 2
# These responses are used in a job without demonstrations.
RESPONSES = ["Yes, of course.", "I do not know."]


async def rehearse(calls: Calls, prepared: Prepared) -> None:
    """Call every function on the first prompts of iteration 1 with plausible responses. The results are checked and
    discarded. Raises RewardError."""
    functions = await calls.open()
    everyone = prepared.prompts(1)
    records = everyone[:PROMPTS]
    count = prepared.spec.ppo.samples_per_prompt
    demonstrations = prepared.data.demonstrations
    known = [d.response for d in demonstrations.batch(1, 2 * PROMPTS)] if demonstrations is not None else RESPONSES
    responses = cycle(known)
    for number, function in enumerate(functions):
        for record in records:
            size = count if function.needs == "Group" else 1
            given = list(islice(responses, size))
            fields = fields_of(everyone, [record] * size)
            call = Call(1, record.index, [record.text] * size, given, fields)
            await calls.rewards(number, call, rehearsal=True)
