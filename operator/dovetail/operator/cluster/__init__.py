"""What the operator sees of the cluster, and how it talks to it."""
