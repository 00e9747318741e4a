"""The iterations: what is drawn, scored, learnt and published, in which order."""
