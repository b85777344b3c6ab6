"""`fitact` and `python -m fitact` are the command line."""

import os
import sys


def main() -> int:
    """Run the command line on the process's arguments and return its exit status."""
    # NumPy's products are small here, and its idle threads would spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from .cli import main as run  # takes long enough to be interrupted

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("fitact: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
