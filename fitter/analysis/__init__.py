"""What is known of a formula: enclosures, roots, shape, where floating point fails."""
