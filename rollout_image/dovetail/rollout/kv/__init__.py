"""Keys and values of a migrating sample, from one vLLM server to another: an out-of-tree KV connector over TCP."""
