"""A pytest plugin: every `Study.optimize` of the tests passes ``executor=``, a FleetExecutor.

It is loaded into the pytest that runs Optuna's tests, whose package is called `tests` as well: so
it imports nothing from ours.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import multiprocessing.process
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fleet")
    group.addoption("--fleet-width", type=int, help="devices of the executor")
    group.addoption("--fleet-orders", type=Path, help="JSON: tests left out, tests run inline")
    group.addoption("--fleet-report", type=Path, help="where the outcomes are written, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("collectonly"):
        config.pluginmanager.register(_Redirected(config), "fleet-redirected")


class _Redirected:
    """One run of pytest: the executors that trials run on, and what became of each test."""

    def __init__(self, config: pytest.Config) -> None:
        orders = json.loads(config.getoption("--fleet-orders").read_text())
        self._left_out: dict[str, str] = orders["left out"]
        self._inline: list[str] = orders["inline"]
        self._storages: list[str] = orders["storages"]
        self._report: Path = config.getoption("--fleet-report")
        self._width: int = config.getoption("--fleet-width")
        self._executors = _Executors(self._width)
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._reached: set[str] = set()
        self._current = ""
        _redirect(self._executor)
        self._redirect_processes()

    def _executor(self) -> contextlib.AbstractContextManager[FleetExecutor]:
        self._reached.add(self._current)
        if _name(self._current) in self._inline:
            return FleetExecutor(device_type="cpu", cluster="inline")
        return self._executors.one()

    def _redirect_processes(self) -> None:
        """Redirect also in the processes that a test starts."""
        begin: Any = multiprocessing.process.BaseProcess.__init__

        def begin_redirected(process: Any, *args: Any, target: Any = None, **kwargs: Any) -> None:
            if getattr(target, "__module__", "").startswith("tests."):
                self._reached.add(self._current)
                target = _InOtherProcess(target, self._width)
            begin(process, *args, target=target, **kwargs)

        multiprocessing.process.BaseProcess.__init__ = begin_redirected  # type: ignore[assignment, method-assign]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if _can_optimize(item)]
        if self._storages:
            best: dict[str, int] = {}
            for item in items:
                best[_name(item.nodeid)] = min(best.get(_name(item.nodeid), 99), self._rank(item))
            items[:] = [i for i in items if self._rank(i) == best[_name(i.nodeid)] < 99]
        items[:] = [item for item in items if not self._is_left_out(item)]

    def _rank(self, item: Any) -> int:
        """The first storage will do, or the next one; of `n_jobs` nothing is made."""
        params = item.callspec.params if hasattr(item, "callspec") else {}
        modes = {value for name, value in params.items() if name.endswith("storage_mode")}
        if params.get("n_jobs", 1) != 1 or not modes <= set(self._storages):
            return 99
        return max(map(self._storages.index, modes), default=0)

    def _is_left_out(self, item: Any) -> bool:
        reason = self._left_out.get(_name(item.nodeid))
        if reason is None:
            return False
        self._outcomes[item.nodeid] = {"outcome": "left out", "text": reason}
        self._reached.add(item.nodeid)
        return True

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._current = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext if report.outcome == "failed" else ""
            # Pictures of plotly are written by another package, which may not be there.
            outcome = "skipped" if "requires the Kaleido package" in text else report.outcome
            self._outcomes[report.nodeid] = {"outcome": outcome, "text": text}

    def pytest_sessionfinish(self) -> None:
        self._executors.close()
        relevant = {
            name: what
            for name, what in self._outcomes.items()
            if name in self._reached or what["outcome"] == "failed"
        }
        self._report.write_text(json.dumps(relevant))


class _InOtherProcess:
    """What a process that a test starts is to do, with `Study.optimize` redirected there too."""

    def __init__(self, target: Callable[..., None], width: int) -> None:
        self._target = target
        self._width = width

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        executors = _Executors(self._width)
        _redirect(executors.one)
        try:
            self._target(*args, **kwargs)
        finally:
            executors.close()


def _redirect(executor: Callable[[], contextlib.AbstractContextManager[FleetExecutor]]) -> None:
    optimize: Any = optuna.Study.optimize

    @functools.wraps(optimize)
    def redirected(study: Any, func: Any, *args: Any, n_jobs: int = 1, **kwargs: Any) -> None:
        """As called by a user who has devices now where he had `n_jobs`."""
        with executor() as chosen:
            optimize(study, func, *args, **kwargs, executor=chosen)

    optuna.Study.optimize = redirected  # type: ignore[assignment, method-assign]


class _Executors:
    """One executor for the whole run, and another where a test optimizes in several threads."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._lock = threading.Lock()
        self._free: list[FleetExecutor] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[FleetExecutor]:
        with self._lock:
            executor = self._free.pop() if self._free else None
        if executor is None:
            executor = FleetExecutor(devices=self._width, device_type="cpu")
        try:
            yield executor
        finally:
            with self._lock:
                self._free.append(executor)

    def close(self) -> None:
        for executor in self._free:
            executor.close()


def _name(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]


def _can_optimize(item: Any) -> bool:
    """Whether the code of a test, or of a function that it names or gets, says `optimize`."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    todo, seen = [inspect.unwrap(item.function), *params], set()
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        names = set(_names_in(function.__code__))
        if "optimize" in names:
            return True
        todo += [function.__globals__[name] for name in names & set(function.__globals__)]
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
