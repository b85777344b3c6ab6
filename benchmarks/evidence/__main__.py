"""`python -m benchmarks.evidence`, from the root of the repository."""

from .run import main

if __name__ == "__main__":
    main()
