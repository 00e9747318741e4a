"""`python -m dovetail.operator.api`."""

import sys

from dovetail.operator.api.main import main

sys.exit(main())
