"""The vLLM server, with its start, its plug-ins and its routes."""
