"""Dialogues as text, and text as tokens."""
