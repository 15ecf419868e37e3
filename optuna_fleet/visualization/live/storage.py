"""Opens a study to look at: nothing is made, nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.patience import in_words

_MAGIC = b"SQLite format 3\0"


def open_study(name: str | None, url: str) -> optuna.Study:
    """The study of that name, or the only one there is.

    Args:
        name: Its name; None if the storage has one study.
        url: As Optuna's command line takes it: of a database or a Redis server, or a journal file.

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
