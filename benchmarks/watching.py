"""Draws the pictures of docs/index.md.

python -m benchmarks.watching             # `optuna-fleet top` and its page, of a sweep of digits
python -m benchmarks.watching --notebook  # a part of examples/notebook.ipynb; needs nbconvert

Two minutes each on 2 cores; page and notebook need Chromium.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from examples import digits
from optuna_fleet import FleetExecutor
from optuna_fleet.visualization.live.page import page
from optuna_fleet.visualization.live.snapshot import Snapshot, snapshot_of
from optuna_fleet.visualization.live.storage import open_study
from optuna_fleet.visualization.live.terminal import rendered
from optuna_fleet.visualization.live.view import View, view_of
from tests.browser import Browser, has_browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_LEAST_ENDED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notebook", action="store_true")
    if parser.parse_args().notebook:
        draw_notebook()
    else:
        draw_sweep()


def draw_sweep() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/study.db"
        study = optuna.create_study(
            study_name="digits",
            storage=url,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2),
        )
        seen: list[View] = []
        watcher = threading.Thread(target=watch, args=(url, study, seen), daemon=True)
        watcher.start()
        pipeline = digits.make_pipeline()
        with FleetExecutor(pipeline, devices=4, device_type="cpu", max_trials=3) as fleet:
            objective: Any = partial(digits.objective, num_epochs=15)
            study.optimize(objective, n_trials=24, executor=fleet)
        watcher.join(10)
        draw(*seen, Path(folder))


def watch(url: str, study: optuna.Study, seen: list[View]) -> None:
    """Look until there is something of everything to see; then stop the sweep."""
    own = open_study("digits", url)
    while not seen:
        snapshot = snapshot_of(own, time.time())
        if is_worth_seeing(snapshot):
            seen.append(view_of(snapshot))
        time.sleep(0.5)
    study._stop_flag = True


def is_worth_seeing(snapshot: Snapshot) -> bool:
    has_ended = len(snapshot.recent) >= _LEAST_ENDED
    are_known = len(snapshot.runs) > 1 and all(run.samples_per_s for run in snapshot.runs)
    return has_ended and are_known and snapshot.expected_end is not None


def draw(view: View, folder: Path) -> None:
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(rendered(view))
    console.save_svg(
        str(IMAGES / "top.svg"), title="optuna-fleet top --storage sqlite:///study.db"
    )
    if not has_browser():
        print("There is no Chromium for the page.")
        return
    (folder / "page.html").write_text(page(view, time.time(), 3600))
    photograph(folder / "page.html", IMAGES / "page.png", height=700)


def photograph(page: Path, image: Path, height: int) -> None:
    with Browser(height=height) as browser:
        browser.open(page.as_uri())
        image.write_bytes(base64.b64decode(browser.screenshot()))


def draw_notebook() -> None:
    """Run it, with the interrupt, and show the cells from the summary to that."""
    import plotly.io
    from nbconvert import HTMLExporter

    from tests.examples.test_notebook import run_notebook

    notebook = run_notebook()[0]
    first = next(i for i, c in enumerate(notebook.cells) if c.source.startswith("fleet.summary"))
    notebook.cells = notebook.cells[first : first + 4]
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        figure = output.get("data", {}).get("application/vnd.plotly.v1+json")
        if figure is not None:
            drawn = plotly.io.from_json(json.dumps(figure), skip_invalid=True)
            output.data = {"text/html": drawn.to_html(full_html=False)}
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "notebook.html"
        written.write_text(exporter.from_notebook_node(notebook)[0])
        photograph(written, IMAGES / "notebook.png", height=1250)


if __name__ == "__main__":
    main()
