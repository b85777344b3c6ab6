"""Integrals, best quotients, weights, the errors of a step function, the dtypes that outputs are kept in."""
