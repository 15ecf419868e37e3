"""Groups of a trial's ranks: they leave nothing behind, and hold up nobody who comes next."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import UserDict
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist

from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.trainer import groups, nested
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.node_messages import ProcessId, StoreReady
from tests.fleets import Leg


def values(fleet: Any, objective: Any, num_trials: int) -> list[float]:
    """Of trials one after the other, on the same two devices."""
    fleet.script = {number: [Leg((0, 1))] for number in range(num_trials)}
    study = optuna.create_study()
    study.optimize(objective, n_trials=num_trials, executor=fleet)
    return [trial.value for trial in study.trials]


def counts(trial: Any, *, seen: Path) -> float:
    groups.wait_until_left()  # those of trials before
    found = len(os.listdir("/proc/self/fd")), threading.active_count(), id(sys.excepthook)
    with (seen / str(trial.rank)).open("a") as file:
        print(*found, file=file)
    return float(trial.sum(1))


def test_groups_leave_nothing_behind(fleet: Any, tmp_path: Path) -> None:
    values(fleet, functools.partial(counts, seen=tmp_path), 12)
    for rank in "01":
        rows = [map(int, line.split()) for line in (tmp_path / rank).read_text().splitlines()]
        files, threads, hooks = zip(*rows, strict=True)
        assert max(files[6:]) <= files[3] + 2
        assert max(threads[6:]) <= threads[3]
        assert len(set(hooks)) == 1  # torch replaces it


def part_ways(trial: Any) -> float:
    """The first trial begins what the other rank never does."""
    if trial.number == 0:
        trial.sum(1)
        dist.broadcast(torch.ones(1), src=1 - trial.rank, async_op=True)
        return 2.0
    return float(trial.sum(1))


def test_ranks_that_went_different_ways_hold_up_no_other_group(fleet: Any) -> None:
    began = time.monotonic()
    assert values(fleet, part_ways, 3) == [2.0] * 3
    assert time.monotonic() - began < 60  # they would wait for longer


def join_late(trial: Any, *, mark: Path) -> float:
    """Whether rank 1, which is the last to join, has done so when the group is there."""
    if trial.number == 0 and trial.rank == 1:
        begin = dist.init_process_group

        def begin_slowly(*args: Any, **options: Any) -> None:
            begin(*args, **options)
            time.sleep(0.2)
            mark.touch()
            dist.init_process_group = begin

        dist.init_process_group = begin_slowly
    return float(mark.exists())


def test_nobody_is_done_joining_before_all_have_joined(fleet: Any, tmp_path: Path) -> None:
    """Or a rank that leaves at once would leave others behind that still connect."""
    assert values(fleet, functools.partial(join_late, mark=tmp_path / "joined"), 2) == [0.0, 1.0]


def join(**more: Any) -> None:
    groups.join_group(RunTrial(run_id=0, number=0, seed=0, maximize=None, **more), "cpu")


def test_who_has_joined_in_vain_begins_anew() -> None:
    _store, port = groups.serve_store()
    store = StoreReady(host="127.0.0.1", port=port, process=ProcessId("agent", 0))
    with pytest.raises(TrainerLostError, match="Rank 0 of 2"):
        join(world_size=2, group="lonely", store=store, collective_s=1)
    assert groups.group_size() == 1
    assert dist.distributed_c10d._world.group_count == 0  # who counts on never meets others


def test_broken_group_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    join()

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(dist, "get_backend", lambda: "another")
    monkeypatch.setattr(dist, "destroy_process_group", broken)
    groups.leave_group()
    assert not dist.is_initialized()
    monkeypatch.undo()
    join()
    groups.leave_group()


@pytest.mark.filterwarnings("ignore:Local rank information")
def test_ignite_goes_by_the_present_group() -> None:
    idist = pytest.importorskip("ignite.distributed")
    for _ in range(2):
        join()
        assert idist.model_name() == "native-dist"
        groups.leave_group()
        assert idist.model_name() == "serial"


class OfTheirs(UserDict[str, Any]):
    """A batch class with a way of its own to a device."""

    def to(self, device: torch.device) -> OfTheirs:
        return OfTheirs({key: value.to(device) for key, value in self.items()})


def test_what_moves_itself_is_asked_to() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    data = [packed, OfTheirs(x=torch.ones(1)), torch.ones(1)]
    lengths, theirs, _ = nested.to_device(data, torch.device("meta"))
    assert lengths.data.is_meta
    assert lengths.batch_sizes.tolist() == [2, 1]
    assert theirs["x"].is_meta
    same = nested.map_tensors(data, lambda tensor: tensor + 1)
    assert same[:2] == data[:2]
    assert same[2] == 2
