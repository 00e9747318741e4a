"""What the calculator of the documentation answers. It runs in a browser, beside the planner."""
