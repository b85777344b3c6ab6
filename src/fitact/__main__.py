"""`fitact` and `python -m fitact` are the command line."""

import sys

from fitact.base import interrupts


def main() -> int:
    """Run the command line on the process's arguments and return its exit status."""
    interrupts.end_at_once()
    from .cli import main as run  # takes long enough to be interrupted

    status = run()
    interrupts.come_too_late()
    return status


if __name__ == "__main__":
    sys.exit(main())
