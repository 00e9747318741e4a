"""`python -m dovetail.statusapi`."""

import sys

from dovetail.statusapi.main import main

sys.exit(main())
