"""What the run page shows of a run, as JSON documents made of its folder."""
