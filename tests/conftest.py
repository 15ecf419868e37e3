"""Fleets that many tests share: starting torch processes costs seconds."""

from __future__ import annotations

import gc
import io
import logging
import math
import os
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import optuna
import pytest

from optuna_fleet.executor.fleet import pipelines
from tests import leftovers, workers
from tests.huge_pages import use_huge_pages
from tests.nursery import Nursery, processes_start_afresh

gc.disable()  # while modules are imported, of which nothing is to be freed

# On a busy machine an example may take any time, and so may its making. With EXPLORE=1 there are
# other examples at each run.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="EXPLORE" not in os.environ,
)
hypothesis.settings.load_profile("untimed")

# Shells start what runs in the background so that it ignores Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    workers.fork_them()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files: in whole folders tests mostly wait, and all workers would at a time."""
    items.sort(key=lambda item: zlib.crc32(item.path.name.encode()))


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it looked at again and again
    use_huge_pages()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain of what they find in the end
    if "PYTEST_XDIST_WORKER" not in os.environ:  # after the summary, which an error would hide
        workers.end_them()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    os.environ[leftovers.MARK] = str(os.getpid())
    segments, sockets = leftovers.shared_memory(), leftovers.sockets()
    yield
    assert leftovers.processes_in_the_end() == []
    assert leftovers.sockets() <= sockets
    assert leftovers.shared_memory() <= segments


@pytest.fixture(scope="session", autouse=True)
def nursery(_nothing_is_left_behind: None) -> Iterator[Nursery]:
    """Agents and solvers of the tests' fleets are forked from it."""
    nursery = workers.ours or Nursery()
    with nursery.bears_all():
        yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def afresh(nursery: Nursery) -> Iterator[None]:
    """Agents and solvers are started as for users, not forked."""
    with processes_start_afresh():
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_gpus() -> Iterator[None]:
    """On any machine these tests are about CPU slots; `gpus` is for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module", autouse=True)
def _data_are_never_slow(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a busy machine they may be, and then no trial is widened: nobody measures that.

    But for modules that have WINDOW_S: their tests are about it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(request.module, "WINDOW_S"):
            patch.setattr(pipelines, "WINDOW_S", math.inf)
        yield


@pytest.fixture(scope="module")
def gpus(_no_gpus: None) -> Iterator[None]:
    """Shows the machine's GPUs again."""
    with pytest.MonkeyPatch.context() as patch:
        if _VISIBLE is None:
            patch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            patch.setenv("CUDA_VISIBLE_DEVICES", _VISIBLE)
        yield


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What Optuna's loggers, and ours below them, print."""
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("optuna").addHandler(handler)
    yield handler.stream
    logging.getLogger("optuna").removeHandler(handler)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Any]:
    """Four CPU slots with small data sets."""
    from tests.fleets import fleet_of  # imports torch, which the master of workers does not need

    with fleet_of(devices=4) as executor:
        yield executor
