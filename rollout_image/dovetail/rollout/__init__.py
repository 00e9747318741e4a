"""The processes of a rollout pod: a vLLM server with our plug-ins, and the scorer. Both receive weights."""
