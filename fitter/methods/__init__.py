"""The methods, one per file; `table` has all of them by name."""
