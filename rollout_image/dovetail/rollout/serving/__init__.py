"""The vLLM server: its start, its plug-ins and its routes."""
