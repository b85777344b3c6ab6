"""From a formula to a record."""
