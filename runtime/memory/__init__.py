"""Counting what autograd keeps, and measuring the peak of a step."""
