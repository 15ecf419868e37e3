"""``optuna-fleet top``: watches a study, in a terminal or as a page."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.files import replacing
from optuna_fleet.sampler_bridge.patience import in_words
from optuna_fleet.visualization.live.page import page
from optuna_fleet.visualization.live.snapshot import Snapshot
from optuna_fleet.visualization.live.storage import open_study
from optuna_fleet.visualization.live.terminal import rendered
from optuna_fleet.visualization.live.view import View, view_of

_LONGEST_S = 86400.0


def add_top(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "top",
        help="watch a study: who trains where and how fast, what is best, when it will be done",
        description="Shows what the study has stored, again and again until Ctrl+C. Never writes "
        "to it. The driver tells every few seconds how it goes.",
    )
    command.add_argument("study", nargs="?", metavar="STUDY", help="needed if there are several")
    command.add_argument(
        "--storage",
        required=True,
        metavar="URL",
        help="of a database, as in sqlite:///study.db, or redis://...; or a journal file",
    )
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write it as a page that loads itself anew, instead of to the terminal",
    )
    command.add_argument("--interval", type=_seconds, default=2.0, metavar="SECONDS")
    command.add_argument("--once", action="store_true", help="show it once and end")
    command.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(options.study, options.storage)
    show = _in_terminal if options.html is None else _as_page(options.html, options.interval)
    with contextlib.suppress(KeyboardInterrupt), _until_interrupt(options.interval) as goes_on:
        show(_views(study, (lambda: False) if options.once else goes_on))
    return 0


@contextlib.contextmanager
def _until_interrupt(interval_s: float) -> Iterator[Callable[[], bool]]:
    """Gives what waits for so long, and says whether there was no Ctrl-C.

    The first Ctrl-C raises nothing, as it could come within a callback of SQLAlchemy's, where
    exceptions are lost. A second one does, should the storage not answer.
    """
    pressed: list[bool] = []
    told, tell = os.pipe()

    def press(*_: object) -> None:
        os.write(tell, b"!")
        pressed.append(True)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: not select.select([told], [], [], interval_s)[0]
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(told)
        os.close(tell)


def _views(study: optuna.Study, goes_on: Callable[[], bool]) -> Iterator[View]:
    """One after each wait; the last one again, with a note, while the storage is gone."""
    view = view_of(Snapshot(study, time.time()))
    yield view
    while goes_on():
        try:
            view = view_of(Snapshot(study, time.time()))
        except Exception as error:
            note = ("storage", f"can't be read: {in_words(error)}")
            facts = (*(fact for fact in view.facts if fact[0] != note[0]), note)
            view = replace(view, facts=facts, is_alarming=True)
        yield view


def _in_terminal(views: Iterator[View]) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ImportError(
            "`optuna-fleet top` needs rich: pip install 'optuna-fleet[top]'. With --html FILE it "
            "writes a page, and needs nothing."
        ) from error
    console = Console()
    if not console.is_terminal:
        console.print(rendered(next(views)))
        return
    if console.is_dumb_terminal:  # it has no cursor to move, and would show the last one only
        for view in views:
            console.print(rendered(view))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for view in views:
            live.update(rendered(view), refresh=True)


def _as_page(path: Path, interval_s: float) -> Callable[[Iterator[View]], None]:
    def write(views: Iterator[View]) -> None:
        for number, view in enumerate(views):
            _replace(path, page(view, time.time(), interval_s))
            if not number:
                print(f"Written to {path}; open it in a browser.", flush=True)

    return write


def _replace(path: Path, text: str) -> None:
    """Write it so that a browser never sees a part of it."""
    try:
        os.stat(path.parent)  # which would be made
        with replacing(path) as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text.encode())
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror}.") from error


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (value := float(text)) <= _LONGEST_S:
            return value
    wanted = f"a number of seconds >= 0.1 and <= {_LONGEST_S:g}"
    raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
