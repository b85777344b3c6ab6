"""The routing of rows to experts: the indices that say where rows go, and the weights that are chosen."""
