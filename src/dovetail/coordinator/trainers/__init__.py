"""The trainer ranks: which have joined, and which commands they run."""
