"""The parts that the operator and the status API share. These are names, kinds of objects, and the connection to a
cluster."""
