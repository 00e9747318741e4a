"""Episodes of an agent: their tokens, and the calls of tools, each of which has its effect once."""
