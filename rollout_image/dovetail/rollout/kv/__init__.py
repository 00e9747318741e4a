"""An out-of-tree KV connector of vLLM. It sends the KV cache of a migrating sample from one server to another over
TCP."""
