"""Formulas: the atoms and their values, the grammar, the catalog, accurate rewriting, multiprecision values."""
