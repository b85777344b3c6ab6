"""Times, bytes and instructions of the kernels, and which limit of a GPU binds them."""
