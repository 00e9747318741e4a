"""The KV cache of a migrating sample goes from one vLLM server to another: an out-of-tree KV connector over TCP."""
