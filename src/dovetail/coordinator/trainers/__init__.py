"""The trainer ranks: who has joined, and what they are told to do."""
