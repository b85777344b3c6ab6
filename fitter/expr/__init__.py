"""Formulas: the atoms and their values, the grammar, the named activations, accurate rewriting, many digits."""
