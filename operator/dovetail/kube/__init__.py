"""What the operator and the status API both need of a cluster: names, kinds of objects, and the connection."""
