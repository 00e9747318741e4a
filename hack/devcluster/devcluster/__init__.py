"""A Kubernetes cluster on one Linux machine; see README.md beside this folder."""
