"""What surrounds an objective: the script it is from, its modules, and what runs before it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import (
    FleetExecutor,
    LaunchError,
    Limits,
    LocalCluster,
    SharedPipeline,
    TrainerLostError,
)
from optuna_fleet.exceptions import FleetConfigError, FleetError
from tests.nursery import FIRST, Nursery

ROOT = Path(__file__).parents[2]


def value_of(fleet: FleetExecutor, objective: Any) -> float:
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.best_value


def cpu_fleet(pipeline: SharedPipeline | None = None, **options: Any) -> FleetExecutor:
    return FleetExecutor(pipeline, devices=1, device_type="cpu", **options)


def printed(text: str) -> str:
    """Without what gloo prints, in some versions of torch."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("[Gloo]"))


# -- objectives of scripts ------------------------------------------------------------------------

HELPER = """
def found():
    import random, numpy, torch
    import torch.distributed as dist
    return {
        "threads": torch.get_num_threads(),
        "drawn": [random.random(), numpy.random.rand(), float(torch.rand(()))],
        "size": dist.get_world_size() if dist.is_initialized() else None,
        "dtype": str(torch.get_default_dtype()),
    }
"""

SCRIPT = """
import json, os, pathlib, signal, sys, threading
from dataclasses import dataclass

import optuna

from optuna_fleet import FleetExecutor
import helper

class MyError(Exception):
    def __init__(self, what, code=0):
        super().__init__(what)
        self.code = code

@dataclass
class Space:
    high: float

    def sample(self, trial):
        return trial.suggest_float("x", 0, self.high)

SPACE = Space(2.0)

def plain(trial):
    trial.set_user_attr("imported", "".join(["tor", "ch"]) in sys.modules)
    return SPACE.sample(trial) + SPACE.high

class Objective:
    def __init__(self, offset):
        self.offset = offset

    def __call__(self, trial):
        if trial.number % 2:
            raise MyError("odd", 7)
        return self.offset

def closure(offset):
    def objective(trial):
        return offset
    return objective

def late(trial):
    if trial.number == 0:
        import torch
        is_alone = torch.distributed.get_world_size() == 1  # at once
    elif trial.number == 1:
        import importlib
        importlib.import_module("torch.nn.functional")
    else:
        threads = [threading.Thread(target=__import__, args=["torch"]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trial.set_user_attr("found", helper.found())
    return 0.0

def late_and_rude(trial):
    late(trial)
    import torch
    torch.set_default_dtype(torch.float16)  # of no concern to the next trial
    torch.manual_seed(0)
    return 0.0

def dies_at_first(trial):
    found = helper.found()
    before = pathlib.Path("before.json")
    if trial.number == 0 and not before.exists():
        before.write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGKILL)  # its successor has not imported torch
    trial.set_user_attr("found", found)
    return 0.0

def study_of(objective, num_trials, executor, **options):
    study = optuna.create_study()
    study.optimize(objective, n_trials=num_trials, executor=executor, **options)
    return study

def told(objective, name, executor):
    return [trial.user_attrs[name] for trial in study_of(objective, 3, executor).trials]

if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    results = {}
    with FleetExecutor(devices=3, device_type="cpu") as fleet:
        study = study_of(plain, 2, fleet)
        results["plain"] = [t.value - t.params["x"] for t in study.trials]
        results["imported"] = [t.user_attrs["imported"] for t in study.trials]
        study = study_of(Objective(3.0), 4, fleet, catch=(MyError,))
        results["object"] = [t.state.name for t in study.trials]
        try:
            study_of(Objective(3.0), 4, fleet)
        except MyError as error:
            results["error"] = [error.args[0], error.code]
        study = study_of(closure(4.0), 2, fleet)
        study.optimize(lambda trial: 5.0, n_trials=2, executor=fleet)
        results["closures"] = [t.value for t in study.trials]
        results["late"] = [told(late_and_rude, "found", fleet) for _ in range(2)]
        results["late"].append(told(dies_at_first, "found", fleet))
        results["before"] = json.loads(pathlib.Path("before.json").read_text())
    results["torch here"] = "torch" in sys.modules
    results["inline"] = told(late, "found", FleetExecutor(cluster="inline"))
    results["group left"] = not sys.modules["torch"].distributed.is_initialized()
    finders = [type(finder).__module__ for finder in sys.meta_path]
    results["finders left"] = [name for name in finders if name.startswith("optuna_fleet")]
    print(json.dumps(results))
"""


def test_objectives_of_a_script_and_torch_whenever_they_import_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The folder's name is in the objective's pickle, where torch's would have it imported first.
    folder = tmp_path_factory.mktemp("late")
    (folder / "helper.py").write_text(HELPER)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(printed(done.stdout))
    first, *others = told.pop("late")
    assert others == [first, first]
    assert told.pop("before") == first[0]
    assert len({tuple(found["drawn"]) for found in first}) == 3
    assert [found["size"] for found in first] == [1, 1, 1]
    assert len({found["threads"] for found in first}) == 1
    assert {found["dtype"] for found in first} == {"torch.float32"}
    assert [{**f, "threads": first[0]["threads"]} for f in told.pop("inline")] == first
    assert told == {
        "plain": pytest.approx([2.0, 2.0]),
        "imported": [False, False],
        "object": ["COMPLETE", "FAIL", "COMPLETE", "FAIL"],
        "error": ["odd", 7],
        "closures": [4.0, 4.0, 5.0, 5.0],
        "torch here": False,
        "group left": True,
        "finders left": [],
    }


SPAWNING = """
import functools, multiprocessing, pickle, sys
import optuna
from optuna_fleet import FleetExecutor

class Point:
    def __init__(self, x): self.x = x

def double(queue, point):
    queue.put(Point(2 * point.x))

def objective(trial):
    point = pickle.loads(pickle.dumps(Point(trial.number + 1)))
    assert type(point) is Point
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=double, args=(queue, point))
    process.start()
    process.join()
    return queue.get().x if process.exitcode == 0 else -1

class Objective:
    def __call__(self, trial): return objective(trial)

def main(*objectives):
    with FleetExecutor(devices=1) as fleet:
        for what in objectives:
            study = optuna.create_study()
            study.optimize(what, n_trials=1, executor=fleet)
            print("value", study.trials[0].value)

"""
GUARDED = "if __name__ == '__main__': main(objective, functools.partial(objective), Objective())"


def ran(nursery: Nursery, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    return nursery.run(path, folder=folder)


def test_an_objective_may_pickle_and_spawn_what_its_script_defines(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = ran(nursery, tmp_path, SPAWNING + GUARDED)
    assert printed(ended.stdout).split() == 3 * ["value", "2.0"], ended.stderr


def test_a_script_without_a_main_guard_is_told_so_by_what_it_spawns(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = ran(nursery, tmp_path, SPAWNING + "main(objective)")
    assert 'put that under `if __name__ == "__main__":`' in ended.stderr
    assert printed(ended.stdout).split() == ["value", "-1.0"]


WITHOUT_STREAMS = """
import pathlib, sys
import optuna, torch
from optuna_fleet import FleetExecutor, SharedPipeline

def objective(trial):
    torch.backends.cudnn.benchmark = True
    print("heard by nobody")
    print("nor this", file=sys.stderr)
    trial.prepare(torch.nn.Linear(1, 1))
    return float(sum(map(len, trial.batches("train", batch_size=2))))

study = optuna.create_study()
data = SharedPipeline(train=torch.zeros(10, 1))
with FleetExecutor(data, devices=1, device_type="cpu") as fleet:
    study.optimize(objective, n_trials=2, executor=fleet)
pathlib.Path(sys.argv[1]).write_text(f"{study.best_value}")
"""


def test_a_script_need_have_no_streams_and_its_objective_may_mention_any_module(
    tmp_path: Path,
) -> None:
    path, answer = tmp_path / "script.py", tmp_path / "answer"
    path.write_text(WITHOUT_STREAMS)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(path), str(answer)]
    subprocess.run(command, check=True)
    assert answer.read_text() == "10.0"


# -- where a call is made -------------------------------------------------------------------------


def test_folder_variables_path_and_arguments_are_those_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was removed will do as well."""

    def objective(trial: optuna.Trial) -> float:
        import importlib

        name = Path("name").read_text()
        trial.set_user_attr("module", importlib.import_module(f"module_of_{name}").NAME)
        trial.set_user_attr("found", [name, os.environ.get("OF_THIS_CALL"), sys.argv[1:]])
        trial.set_user_attr("zone", time.tzname[0])
        return 0.0

    monkeypatch.setenv("OF_THIS_CALL", "as it began")
    with cpu_fleet() as fleet:
        for name, variable in [("first", "one"), ("second", None), ("third", "three")]:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "name").write_text(name)
            (folder / f"module_of_{name}.py").write_text(f"NAME = {name!r}")
            with monkeypatch.context() as patch:
                patch.chdir(folder)
                patch.syspath_prepend(folder)
                patch.setattr(sys, "argv", ["script.py", name])
                patch.setenv("OF_THIS_CALL", variable or "")
                patch.setenv("TZ", f"{name[:3]}-9")
                if variable is None:
                    patch.delenv("OF_THIS_CALL")
                study = optuna.create_study()
                study.optimize(objective, n_trials=1, executor=fleet)
            attrs = study.best_trial.user_attrs
            found = [name, variable, [name]]
            assert attrs == {"module": name, "found": found, "zone": name[:3]}
        (gone := tmp_path / "gone").mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert value_of(fleet, lambda trial: 1.0) == 1.0


def test_an_edited_module_is_seen_once_the_executor_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objective(trial: Any) -> float:
        import edited_helper  # type: ignore[import-not-found]

        return float(edited_helper.VALUE)

    monkeypatch.syspath_prepend(tmp_path)
    with cpu_fleet() as fleet:
        for content in ("VALUE = 1", "VALUE = 1000"):  # lengths by which Python tells them apart
            (tmp_path / "edited_helper.py").write_text(content)
            assert value_of(fleet, objective) == 1
        fleet.close()
        assert value_of(fleet, objective) == 1000


class Shared:
    """A data set whose samples are with a server of the script's."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(self.samples[index])


def test_what_a_manager_of_the_script_keeps_is_there_for_all() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        samples = manager.list([1.0, 2.0, 3.0, 4.0])
        seen = manager.dict()

        def objective(trial: Any) -> float:
            seen["trial"] = trial.number
            return float(sum(batch.sum() for batch in trial.batches("val", batch_size=2)))

        with cpu_fleet(SharedPipeline(val=Shared(samples))) as fleet:
            assert value_of(fleet, objective) == 10.0
        assert dict(seen) == {"trial": 0}


# -- `setup` --------------------------------------------------------------------------------------

REGISTRY = """
print("registry is imported", flush=True)
SIZES = {"small": 1.0}
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's, where scripts register what their objectives look up."""
    (tmp_path / "registry_of_sizes.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("registry_of_sizes", None)


def register() -> None:
    import registry_of_sizes  # type: ignore[import-not-found]

    assert "large" not in registry_of_sizes.SIZES, "set up twice"
    registry_of_sizes.SIZES["large"] = 7.0


def size() -> float:
    import registry_of_sizes

    return float(registry_of_sizes.SIZES["large"])


class Sizes(Shared):
    """A data set whose samples need what was set up."""

    def __init__(self) -> None:
        pass

    def __getitem__(self, index: int) -> float:
        return size()


def trains(trial: Any) -> float:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=size() / 100)
    model, optimizer = trial.prepare(model, optimizer)
    for _ in trial.epochs(2):
        for x in trial.batches("train", batch_size=2):
            assert (x == 7.0).all()
            optimizer.zero_grad()
            model(x[:, None].float()).square().mean().backward()
            optimizer.step()
    return size()


@pytest.mark.usefixtures("registry")
def test_setup_runs_first_in_trainers_preprocessors_and_checks() -> None:
    with cpu_fleet(SharedPipeline(train=Sizes()), setup=register) as fleet:
        for _ in range(2):  # once for each process, not for each call
            assert value_of(fleet, trains) == 7.0
        assert "the same on any devices" in str(fleet.preflight(optuna.create_study(), trains))


@pytest.mark.usefixtures("registry")
def test_setup_runs_inline_too() -> None:
    fleet = FleetExecutor(cluster="inline", setup=register)
    assert [value_of(fleet, lambda trial: size()) for _ in range(2)] == [7.0, 7.0]


def test_what_setup_raises_is_told_as_its_own() -> None:
    def setup() -> None:
        raise KeyError("no such model")

    with cpu_fleet(setup=setup) as fleet, pytest.raises(FleetError) as failed:
        value_of(fleet, lambda trial: 0.0)
    assert "`setup` of the FleetExecutor" in str(failed.value)
    assert "KeyError('no such model')" in str(failed.value)


def test_a_setup_that_can_not_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(FleetConfigError, match=r"`setup` can't be sent .*: `lock`"):
        cpu_fleet(setup=lambda: lock.acquire())


# -- agents that fail, threads that end -----------------------------------------------------------

MIB = 1 << 20
SMALL_FILES = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))"


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of agents, as that of a shell would be."""
    (tmp_path / "first.py").write_text(SMALL_FILES)
    monkeypatch.setenv(FIRST, str(tmp_path / "first.py"))


@pytest.mark.usefixtures("small_files")
def test_memory_that_an_agent_may_not_have_is_named() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    pipeline = SharedPipeline(train=data, memory_bytes=2 << 30)
    with cpu_fleet(pipeline) as fleet, pytest.raises(LaunchError) as raised:
        value_of(fleet, lambda trial: 0.0)
    told = str(raised.value)
    assert "Node local-0 can't be used: its agent failed (OSError: [Errno " in told
    assert f"{2 << 30} bytes for preprocessed data can't be had (File too large)" in told


@pytest.mark.usefixtures("small_files")
def test_an_agent_that_fails_between_trials_tells_why(log: Any) -> None:
    large = bytes(4 * MIB)
    with cpu_fleet(limits=Limits(max_restarts=0)) as fleet:
        assert value_of(fleet, lambda trial: 1.0) == 1.0
        with pytest.raises(TrainerLostError, match=r"its agent failed .OSError: .*File too large"):
            value_of(fleet, lambda trial: float(len(large)))
    words = "Node local-0 was lost: its agent failed (OSError: [Errno 27] File too large); another"
    assert words in log.getvalue()


@pytest.fixture
def _threads_end_slowly() -> Iterator[None]:
    """So that one that nobody waits for is still there."""

    def linger(frame: FrameType, event: str, arg: object) -> None:
        if event == "return" and frame.f_code is threading.Thread.run.__code__:
            time.sleep(0.3)

    threading.setprofile(linger)
    yield
    threading.setprofile(None)


@pytest.mark.usefixtures("_threads_end_slowly")
def test_no_thread_is_left() -> None:
    def objective(trial: Any) -> float:
        model = trial.prepare(torch.nn.Linear(2, 2))
        for _ in trial.epochs(2):
            for (batch,) in trial.batches("train", batch_size=2):
                model(batch).sum().backward()
        return 0.0

    before = set(threading.enumerate())
    data = SharedPipeline(train=torch.utils.data.TensorDataset(torch.zeros(10, 2)))
    fleet = cpu_fleet(data, cluster=LocalCluster(nodes=2))
    optuna.create_study().optimize(objective, n_trials=3, executor=fleet)
    assert set(threading.enumerate()) - before
    fleet.close()
    assert not set(threading.enumerate()) - before
