"""``optuna-fleet top``: watches a study in a terminal; nothing is made there, nothing written."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend

from optuna_fleet.arguments import number_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.patience import in_words
from optuna_fleet.visualization.snapshot import Snapshot

_MAGIC = b"SQLite format 3\0"


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
    seconds = number_of(least=0.1, most=86400)
    command.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS")
    command.add_argument("--once", action="store_true", help="show it once and end")
    command.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(options.study, options.storage)
    with contextlib.suppress(KeyboardInterrupt), until_interrupt(options.interval) as goes_on:
        _show(study, (lambda: False) if options.once else goes_on)
    return 0


def _show(study: optuna.Study, goes_on: Callable[[], bool]) -> None:
    try:
        from rich.console import Console
        from rich.live import Live

        from optuna_fleet.visualization.view import rendered
    except ImportError as error:
        raise ImportError(
            "`optuna-fleet top` needs rich: pip install 'optuna-fleet[top]'."
        ) from error
    console = Console()
    shown = (rendered(snapshot, problem) for snapshot, problem in _snapshots(study, goes_on))
    if not console.is_terminal:
        console.print(next(shown))
    elif console.is_dumb_terminal:  # it has no cursor to move, and would show the last one only
        for each in shown:
            console.print(each)
    else:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for each in shown:
                live.update(each, refresh=True)


def _snapshots(study: optuna.Study, goes_on: Callable[[], bool]) -> Iterator[tuple[Snapshot, str]]:
    """One after each wait; the last one again, with a note, while the storage is gone."""
    snapshot = Snapshot(study, time.time())
    yield snapshot, ""
    while goes_on():
        problem = ""
        try:
            snapshot = Snapshot(study, time.time())
        except Exception as error:
            problem = f"can't be read: {in_words(error)}"
        yield snapshot, problem


@contextlib.contextmanager
def until_interrupt(interval_s: float) -> Iterator[Callable[[], bool]]:
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


# -- the storage ----------------------------------------------------------------------------------


def open_study(name: str | None, url: str) -> optuna.Study:
    """The study of that name, or the only one there is, of a storage as Optuna's command takes it.

    Raises:
        FleetConfigError: There is no such storage, or no such study in it.
    """
    try:
        storage = _opened(url)
        names = optuna.get_all_study_names(storage)
    except (FleetConfigError, ImportError):
        raise
    except Exception as error:
        raise FleetConfigError(
            f"The storage {_shown(url)} can't be read ({in_words(error)}): give what "
            "`create_study(storage=...)` was given, or the path of a journal file."
        ) from error
    if name is None and len(names) == 1:
        (name,) = names
    if name not in names:
        known = ", ".join(map(repr, sorted(names))) or "none"
        wanted = "a study's name is needed" if name is None else f"there is no study {name!r}"
        raise FleetConfigError(f"In {_shown(url)} {wanted}; it has {known}.")
    return optuna.load_study(study_name=name, storage=storage)


def _opened(url: str) -> BaseStorage:
    if url.startswith("redis"):
        return JournalStorage(JournalRedisBackend(url))
    is_url = "://" in url
    if is_url and not url.startswith("sqlite"):
        # Optuna would create its tables where there are none.
        return RDBStorage(url, skip_table_creation=True)
    path = _file_of(url) if is_url else Path(url)
    if not path.is_file():
        raise FleetConfigError(f"There is no file {path}, where the study should be.")
    with path.open("rb") as file:
        if not is_url and file.read(len(_MAGIC)) != _MAGIC:
            return JournalStorage(JournalFileBackend(url))
    # SQLite makes the file where there is none; one that is opened so can't be written either.
    return RDBStorage(
        f"sqlite:///file:{quote(os.path.abspath(path))}?mode=ro&uri=true",
        engine_kwargs={"connect_args": {"timeout": 20}},
        skip_table_creation=True,
    )


def _file_of(url: str) -> Path:
    driver, _, rest = url.partition(":///")
    path, _, _ = rest.partition("?")
    if not path or path == ":memory:" or path.startswith("file:"):
        raise FleetConfigError(
            f"The storage {url} is in the memory of one process, or no plain path: give "
            f"{driver}:///PATH of a file."
        )
    return Path(path)


def _shown(url: str) -> str:
    """Without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}{at}{host}"
