"""The routing of rows to experts: the numbers that say where rows go, and the weights that are chosen."""
