"""What several commands share: changes of fields, missing extras, and tables."""
