"""Makes tests/helpers importable as `helpers`: pytest puts this file's folder on sys.path."""

from hypothesis import settings

# An example's wall-clock time says more about the machine's load than about the code.
settings.register_profile("dovetail", deadline=None)
settings.load_profile("dovetail")
