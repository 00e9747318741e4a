"""Header names on which coordinator and vLLM server agree. They serve to check weights that just arrived
(`coordinator/workers/probing.py`), and to draw a sample with one version of them."""

HEADER = "X-Dovetail-Probe"
"""A server answers a request that has this header even before it may serve. The value is the version that it holds."""

WEIGHTS_HEADER = "X-Dovetail-Weights"
"""A request for a sample has this header. The value is the version that must draw it. A server that serves another
version refuses it."""
