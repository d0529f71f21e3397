"""Notebooks as pages: each is executed by a kernel of its own and shown with what its cells gave.

They are stored without outputs in docs/notebooks/: what a page shows is of the code as it is.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from environments import ROOT

NOTEBOOKS = tuple(sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")))
DOWNLOAD = "Download this notebook"
"""The one link to a notebook that does not lead to its page."""
_PATIENCE = 600


@cache
def executed(notebook: Path) -> Any:
    """The notebook with its outputs; nbclient's CellExecutionError shows the cell that failed."""
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    document = nbformat.read(notebook, 4)
    with tempfile.TemporaryDirectory() as folder:
        # Sockets of files: nobody else on this machine reaches the kernel.
        kernel = AsyncKernelManager(
            kernel_name="python3", transport="ipc", connection_file=f"{folder}/kernel.json"
        )
        NotebookClient(
            document, km=kernel, timeout=_PATIENCE, resources={"metadata": {"path": folder}}
        ).execute()
    return document


def notebook_page(notebook: Path) -> str:
    """The page in Markdown. Pictures are within it, as the notebook's own are."""
    return "\n".join(_lines(executed(notebook), notebook.name))


def _lines(document: Any, name: str) -> Iterator[str]:
    for number, cell in enumerate(document.cells):
        if cell.cell_type == "markdown":
            yield from (cell.source, "")
            if not number:
                yield from (f"[{DOWNLOAD}]({name})", "")
            continue
        yield from ("```python", cell.source, "```", "")
        said = "".join(each.text for each in cell.outputs if each.output_type == "stream")
        if said.strip():
            yield from ("```text", said.rstrip(), "```", "")
        for each in cell.outputs:
            if each.output_type in ("display_data", "execute_result"):
                yield from (*_shown(each.data), "")


def _shown(data: Any) -> Iterator[str]:
    """The richest of the forms in which an output comes, as a reader's browser would choose."""
    if "text/html" in data:
        # A blank line would end the piece of HTML within the page.
        unbroken = re.sub(r"\n\s*\n", "\n", data["text/html"])
        yield f'<div class="output">{unbroken}</div>'
    elif "image/png" in data:
        picture = "".join(data["image/png"].split())
        told = escape(data.get("text/plain", ""), quote=True)
        yield f'<div class="output"><img alt="{told}" src="data:image/png;base64,{picture}"/></div>'
    else:
        yield from ("```text", data["text/plain"], "```")
