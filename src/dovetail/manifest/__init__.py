"""The RLHFJob manifest. It has the types, and reads, checks and describes manifests."""
