"""Makes tests/helpers importable as `helpers`: pytest puts this file's folder on sys.path."""
