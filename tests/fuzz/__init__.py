"""The fuzzer: a grammar of what users may write, mutations of it, what must hold of every case, and a reducer."""
