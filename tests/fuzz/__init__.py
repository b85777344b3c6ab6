"""The fuzzer: a grammar of what users may write, mutations of it and what must hold of every case."""
