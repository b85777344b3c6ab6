"""Make the fits that the notebooks compare and that fitact does not ship: python notebooks/refit.py.

Writes notebooks/fits/*.json; the same command gives the same files.
"""

from __future__ import annotations

from pathlib import Path

from fitact.cli import main

FITS = Path(__file__).resolve().parent / "fits"
MIXTURE = "--method relumix --bits"
COMMANDS = {
    f"{activation}_{suffix}": f"--fn {activation} {options} --name {activation}_{suffix}"
    for activation in ("gelu", "silu")
    for suffix, options in {
        "relumix1": f"{MIXTURE} 1",
        "relumix3": f"{MIXTURE} 3",
        "relumix4": f"{MIXTURE} 4",
        "relumix2d": f"{MIXTURE} 2 --objective derivative",
    }.items()
}


def refit(name: str, folder: Path) -> None:
    """Run the command of a fit, by its name in COMMANDS, and write its file into a folder."""
    status = main(["fit", *COMMANDS[name].split(), "--force", "-o", str(folder / f"{name}.json")])
    assert status == 0


if __name__ == "__main__":
    for each in COMMANDS:
        refit(each, FITS)
