"""The methods, one a file; all of them by name in `table`."""
