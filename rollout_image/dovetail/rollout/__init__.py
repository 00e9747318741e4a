"""What runs in a rollout pod: a vLLM server with our plug-ins, the scorer, the receiving end of weights."""
