"""What coordinator and vLLM server agree on to check weights that just arrived (`coordinator/weights/probing.py`)."""

HEADER = "X-Dovetail-Probe"
"""Of a request that a server answers while it may not serve yet; the value is the version that it holds."""
