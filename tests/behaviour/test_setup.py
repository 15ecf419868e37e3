"""What a process of the fleet is before an objective begins: where the script is, and set up."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.exceptions import FleetConfigError, FleetError

REGISTRY = """
print("registry is imported", flush=True)
SIZES = {"small": 1.0}
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's, where scripts register what their objectives look up."""
    (tmp_path / "registry_of_sizes.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "registry_of_sizes"
    sys.modules.pop("registry_of_sizes", None)


def register() -> None:
    import registry_of_sizes

    assert "large" not in registry_of_sizes.SIZES, "set up twice"
    registry_of_sizes.SIZES["large"] = 7.0


def size() -> float:
    import registry_of_sizes

    return float(registry_of_sizes.SIZES["large"])


class Sizes:
    """A data set whose samples need what was set up."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return size()


def value_of(fleet: FleetExecutor, objective: Any) -> float:
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.best_value


def cpu_fleet(pipeline: SharedPipeline | None = None, **options: Any) -> FleetExecutor:
    return FleetExecutor(pipeline, devices=1, device_type="cpu", **options)


def test_folder_variables_path_and_arguments_are_those_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_script_whose_folder_was_removed_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cpu_fleet() as fleet:
        assert value_of(fleet, lambda trial: 2.0) == 2.0
        (gone := tmp_path / "gone").mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert value_of(fleet, lambda trial: 1.0) == 1.0


@pytest.mark.usefixtures("registry")
def test_setup_runs_first_in_trainers_and_preprocessors() -> None:
    def objective(trial: Any) -> float:
        batches = list(trial.batches("val", batch_size=2))
        return size() + float(sum(batch.sum() for batch in batches))

    with cpu_fleet(SharedPipeline(val=Sizes()), setup=register) as fleet:
        for _ in range(2):  # once for each process, not for each call
            assert value_of(fleet, objective) == 7.0 + 4 * 7.0


@pytest.mark.usefixtures("registry")
def test_setup_runs_inline_too() -> None:
    fleet = FleetExecutor(cluster="inline", setup=register)
    assert [value_of(fleet, lambda trial: size()) for _ in range(2)] == [7.0, 7.0]


@pytest.mark.usefixtures("registry")
def test_setup_runs_in_rehearsals() -> None:
    def objective(trial: Any) -> float:
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=size() / 100)
        model, optimizer = trial.prepare(model, optimizer)
        for _ in trial.epochs(2):
            for x in trial.batches("train", batch_size=2):
                optimizer.zero_grad()
                model(x[:, None].float()).square().mean().backward()
                optimizer.step()
        return 0.0

    fleet = cpu_fleet(SharedPipeline(train=Sizes()), setup=register)
    assert "the same on any devices" in str(fleet.preflight(optuna.create_study(), objective))


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
