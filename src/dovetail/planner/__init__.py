"""Plans and schedules: pure functions of the manifest."""
