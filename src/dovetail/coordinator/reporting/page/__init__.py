"""Makes the run page's JSON documents from a run's folder."""
