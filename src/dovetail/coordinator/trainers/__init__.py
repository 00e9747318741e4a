"""The trainer ranks. It tracks which have joined, and which commands they run."""
