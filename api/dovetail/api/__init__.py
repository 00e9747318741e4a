"""The RLHFJob types, their validation, the plan and the messages between a job's processes. No torch."""
