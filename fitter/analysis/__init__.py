"""The analysis of a formula: enclosures, roots, shape, and where floating point fails."""
