"""The life of a trainer rank. It joins, executes the coordinator's commands, and sends heartbeats."""
