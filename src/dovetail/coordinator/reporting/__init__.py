"""What a run tells its user: metrics, events, health, samples as text, its report and results."""
