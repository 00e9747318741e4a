"""`python3 hack/devcluster COMMAND`: the standard library is all it needs."""

import sys

from devcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
