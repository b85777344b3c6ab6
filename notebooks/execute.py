"""Execute the notebooks in place: python notebooks/execute.py [NAME.ipynb ...], by default all of them."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
TIMEOUT = 300  # seconds for a cell: against hanging
PROGRESS = re.compile(r"(fitact: \w+(, \d+ %)?, \d+ s\n)+")  # of a command that takes long
COLORS = 96  # of a picture: line drawings lose nothing, and are a third of the size
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, timeout: int = TIMEOUT) -> Any:
    """Run a notebook in its folder, in a kernel of this interpreter, and return it with new outputs.

    Nothing of the user's Jupyter is read, and nothing of the machine or of the time gets into the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
        nbclient.exceptions.CellTimeoutError: a cell took longer than `timeout` seconds.

    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # no other kernel of the name python3 can be found, and `fitact` is the one beside this interpreter
        kernels = KernelSpecManager(kernel_dirs=[])
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=kernels,
            connection_file=str(Path(folder) / "kernel.json"),
            transport="tcp" if os.name == "nt" else "ipc",
        )
        environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "IPYTHONDIR": folder,
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=timeout,
            shutdown_kernel="immediate",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute(env=environment, cleanup_kc=True)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for output in [*cell.get("outputs", [])]:
            if output.get("name") == "stderr" and PROGRESS.fullmatch(output.text):
                cell.outputs.remove(output)
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    return notebook


def smaller(picture: str) -> str:
    """Return a PNG in base64 with fewer colours."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(COLORS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(names: list[str]) -> None:
    """Execute and write the notebooks of these names."""
    for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        sys.stdout.write(f"wrote {path.relative_to(HERE.parent)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
