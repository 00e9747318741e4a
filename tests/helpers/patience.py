"""How long tests wait, at most, for what a process or another thread is to do."""

# Machines that run tests stand still for minutes at a time, as the host of a CI runner does. What waits shorter fails
# there; what hangs is found all the same. A test may take an hour (`timeout` in pyproject.toml).
PATIENCE = 900.0
