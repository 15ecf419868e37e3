from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import Failure, RankPool

from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.trainer import groups, nested
from optuna_fleet.trainer.groups import GroupSpec
from tests.nursery import Nursery

_prefixes = itertools.count()


class Fleet:
    """Runs a job in groups of the pool's processes."""

    def __init__(self, nursery: Nursery) -> None:
        self.pool = RankPool(nursery, 3)
        self.store, self.port = groups.serve_store()

    def spec(self, rank: int, world_size: int, prefix: str) -> GroupSpec:
        return GroupSpec(
            rank=rank,
            world_size=world_size,
            prefix=prefix,
            store_host="127.0.0.1",
            store_port=self.port,
        )

    def calls(self, members: list[int], job: str, *args: Any) -> dict[int, tuple[Any, ...]]:
        prefix = f"group{next(_prefixes)}"
        return {
            member: (job, self.spec(rank, len(members), prefix), *args)
            for rank, member in enumerate(members)
        }

    def run(self, world_size: int, job: str, *args: Any) -> list[Any]:
        results = self.pool.run(self.calls(list(range(world_size)), job, *args)).values()
        for result in results:
            assert not isinstance(result, Failure), result.text
        return list(results)


@pytest.fixture(scope="module")
def fleet(nursery: Nursery) -> Iterator[Fleet]:
    fleet = Fleet(nursery)
    yield fleet
    fleet.pool.close()


def test_groups_leave_nothing_behind(fleet: Fleet) -> None:
    for seen in fleet.run(2, "resources", 12):
        assert all(hook for *_, hook in seen)
        assert max(files for files, *_ in seen[6:]) <= seen[3][0] + 2
        assert seen[-1][1] <= seen[3][1]


def test_ranks_that_went_different_ways_hold_up_no_other_group(nursery: Nursery) -> None:
    fleet = Fleet(nursery)
    assert fleet.run(2, "part_ways") == [([2.0, 2.0], True)] * 2
    for member in range(3):
        fleet.pool.kill(member)


def test_peer_that_does_not_arrive(fleet: Fleet) -> None:
    spec = fleet.spec(0, 2, "lonely")
    with pytest.raises(TrainerLostError, match="Rank 0 of 2"):
        groups.join_group(spec, "gloo", timeout_s=1)
    assert groups.group_size() == 1


def test_a_rank_that_has_joined_in_vain_finds_others_later(fleet: Fleet) -> None:
    fleet.pool.run({0: ("join_in_vain", fleet.spec(0, 2, "vain"))})
    assert fleet.run(2, "ranks_sum") == [(2, 3.0)] * 2


def test_nobody_is_done_joining_before_all_have_joined(fleet: Fleet, tmp_path: Path) -> None:
    """Or a rank that leaves at once would leave others behind that still connect."""
    assert fleet.run(2, "join_late", str(tmp_path)) == [True, True]


def test_broken_group_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GroupSpec(rank=0, world_size=1, prefix="x", store_host="127.0.0.1", store_port=None)
    groups.join_group(spec, "gloo", timeout_s=5)

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.distributed, "destroy_process_group", broken)
    groups.leave_group()
    assert not torch.distributed.is_initialized()
    groups.join_group(spec, "gloo", timeout_s=5)
    monkeypatch.undo()
    groups.leave_group()


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


@pytest.mark.filterwarnings("ignore:Local rank information")
def test_ignite_goes_by_the_present_group() -> None:
    idist = pytest.importorskip("ignite.distributed")
    spec = GroupSpec(rank=0, world_size=1, prefix="ignite", store_host="", store_port=None)
    for _ in range(2):
        groups.join_group(spec, "gloo", timeout_s=5)
        assert idist.model_name() == "native-dist"
        groups.leave_group()
        assert idist.model_name() == "serial"
