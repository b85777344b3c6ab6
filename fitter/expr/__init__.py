"""Formulas: the table of atoms, the grammar, the catalog, accurate rewriting, values to any digits, enclosures."""
