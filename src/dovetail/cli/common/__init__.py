"""What several commands share: overrides of fields, extras that are missing, tables."""
