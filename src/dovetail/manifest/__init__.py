"""The RLHFJob manifest: its types, how it is read, checked and described."""
