"""Serves a run's result: a vLLM server, a chat in the terminal, and the HTTP API of a chat."""
