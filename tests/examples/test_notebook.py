"""The notebook: run as one runs it, with an interrupt and a changed cell."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests import leftovers

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
_UNDER_WAY = re.compile(r"[1-9] trials on [1-9] devices")
_MARK = "OPTUNA_FLEET_NOTEBOOK"
"""Environment variable that the kernel has, and all that it starts."""


class Interrupting(NotebookClient):  # type: ignore[misc]
    """Interrupts the cell of that tag once its progress bar says that trials are under way."""

    has_interrupted = False

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        is_now = not self.has_interrupted and "interrupt" in cell.metadata.get("tags", ())
        if is_now and _UNDER_WAY.search(str(msg["content"])):
            self.has_interrupted = True
            self.interrupt = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


def run_notebook() -> tuple[Any, list[str]]:
    """The notebook with its outputs, and the processes that there were at its end."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = Interrupting(
        notebook, timeout=None, resources={"metadata": {"path": NOTEBOOK.parent}}
    )
    with client.setup_kernel(env={**os.environ, _MARK: "1"}):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        at_the_end = [line for line in leftovers.processes() if is_of_kernel(line)]
    assert client.has_interrupted
    return notebook, at_the_end


def is_of_kernel(line: str) -> bool:
    """Tests before this one may have left others that are just ending or beginning."""
    try:
        environment = Path("/proc", line.partition(":")[0], "environ").read_bytes()
    except OSError:
        return False
    return f"{_MARK}=1".encode() in environment.split(b"\0")


def outputs_of(notebook: Any, beginning: str) -> list[Any]:
    (cell,) = (cell for cell in notebook.cells if cell.source.startswith(beginning))
    return list(cell.outputs)


def lines_of(outputs: list[Any]) -> list[str]:
    """What the streams show in the end: a line that is written anew is one."""
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    return [line.rpartition("\r")[2] for line in text.split("\n") if line]


def test_the_notebook() -> None:
    notebook, at_the_end = run_notebook()
    (progress,) = lines_of(outputs_of(notebook, "def objective(trial, epochs"))
    assert "100%" in progress
    assert "6/6" in progress
    (summary,) = outputs_of(notebook, "fleet.summary")
    assert "\n  sharing factor" in summary.data["text/plain"]
    assert summary.data["text/plain"].startswith("Sweep of 6 trials (6 complete)")
    (timeline,) = outputs_of(notebook, "plot_timeline")
    assert "application/vnd.plotly.v1+json" in timeline.data
    ends_in_a_few_lines(outputs_of(notebook, "study.optimize(\n    lambda"))
    # A changed cell is what runs.
    outputs = outputs_of(notebook, "def objective(trial):")
    (result,) = (output for output in outputs if output.output_type == "execute_result")
    assert result.data["text/plain"] == "{'version': 'changed'}"
    (kernel,) = at_the_end  # nothing else is left
    assert "ipykernel" in kernel


def ends_in_a_few_lines(outputs: list[Any]) -> None:
    """By the interrupt."""
    (error,) = (output for output in outputs if output.output_type == "error")
    assert error.ename == "KeyboardInterrupt"
    traceback = [line for part in error.traceback for line in part.splitlines()]
    assert len(traceback) < 20, traceback
    lines = lines_of(outputs)
    assert len(lines) <= 3, lines
    assert any("Trials under way (6, 7) failed: KeyboardInterrupt" in line for line in lines)
