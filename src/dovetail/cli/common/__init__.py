"""Parts that several commands share: changes of fields, checks for missing extras, inputs of the planner, tables."""
