"""What coordinator and vLLM server agree on to check weights that just arrived (`coordinator/weights/probing.py`), and
to draw a sample with one version of them."""

HEADER = "X-Dovetail-Probe"
"""Of a request that a server answers while it may not serve yet; the value is the version that it holds."""

WEIGHTS_HEADER = "X-Dovetail-Weights"
"""Of a request for a sample; the value is the version that shall draw it. A server that serves another refuses it."""
