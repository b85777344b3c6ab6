"""What only a GPU can show: whether kernels and gradients are right there, and what time and memory they take.

    python -m benchmarks.gpu PART... [--out DIR] [--seconds S] [--only NAME] [--tiny] [--cpu]

A part is a file: `correctness`, `steps`, `kernels`, `batch`, `training`. Each writes one JSON, a row as soon as it
is measured; `tables` makes docs/gpu.md from these.
"""
