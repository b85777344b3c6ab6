"""Formulas with learned numbers: their ops, autograd, and the module that has the numbers as parameters."""
