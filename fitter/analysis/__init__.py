"""The analysis of a formula: roots, shape, and where floating point fails."""
