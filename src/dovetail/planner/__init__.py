"""Makes plans and schedules from the manifest. All functions are pure."""
