"""The life of a trainer rank: it joins, executes the coordinator's commands, and sends heartbeats."""
