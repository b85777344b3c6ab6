"""Integrals, best quotients, weights, the errors of a step function, the dtypes in which outputs are kept."""
