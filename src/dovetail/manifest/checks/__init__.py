"""The checks of a manifest, and the sentences for manifests that fail them."""
