"""What a manifest must satisfy, and the sentences for manifests that do not."""
