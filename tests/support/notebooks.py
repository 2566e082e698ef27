"""Runs the notebooks of examples/notebooks.

python tests/support/notebooks.py          # writes what they print and draw into them, which the site shows
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def execute(name: str) -> Any:
    """The notebook with what its cells print and draw now; what goes to stderr, and what counts runs, is left out.

    Raises CellExecutionError where a cell fails.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    for name in NAMES:
        nbformat.write(execute(name), FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
