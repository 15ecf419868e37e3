from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Failure, RankPool

from optuna_fleet.exceptions import FleetConfigError, TrainerLostError
from optuna_fleet.trainer import groups, nested
from optuna_fleet.trainer.gradients import collectives
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


def close(a: Any, b: Any, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("method", ["forward", "parts", "accumulate"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("batch_size", [10, 2])
def test_training_is_that_of_one_process(
    fleet: Fleet, optimizer: str, batch_size: int, method: str
) -> None:
    alone = fleet.run(1, "train", optimizer, batch_size, method)[0]
    for world_size in (2, 3):
        ranks = fleet.run(world_size, "train", optimizer, batch_size, method)
        for rank in ranks:
            close(rank, alone)
        close(ranks[0]["state"], ranks[-1]["state"], rtol=0)


@pytest.mark.parametrize("kind", ["plain", "custom", "torch's"])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_batchnorm_input_gradient(
    fleet: Fleet, dtype: torch.dtype, rtol: float, kind: str
) -> None:
    alone = fleet.run(1, "batchnorm_pass", dtype, kind)[0]
    ranks = fleet.run(3, "batchnorm_pass", dtype, kind)
    close(torch.cat([rank["dx"] for rank in ranks]), alone["dx"], rtol)
    for rank in ranks:
        close(rank["state"], alone["state"], rtol)


def test_statistics_without_gradients_in_lockstep(fleet: Fleet) -> None:
    alone = fleet.run(1, "accumulate_stats")[0]
    for rank in fleet.run(3, "accumulate_stats"):
        close(rank, alone)


def test_evaluation_does_not_communicate(fleet: Fleet) -> None:
    assert fleet.run(2, "lonely_passes") == ["done", "done"]


@pytest.mark.parametrize(
    "job", ["freezing", "branches", "trained_before", "sparse", "graphs_norm"]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_odd_graphs(fleet: Fleet, job: str, world_size: int) -> None:
    alone = fleet.run(1, job)[0]
    for rank in fleet.run(world_size, job):
        close(rank, alone)


def test_model_stays_the_users_own(fleet: Fleet) -> None:
    for result in fleet.run(2, "identity"):
        assert result == dict.fromkeys(result, True)


def test_unlike_models_are_refused_on_every_rank(fleet: Fleet) -> None:
    results = fleet.pool.run(fleet.calls([0, 1], "wrong_model"))
    assert {result.kind for result in results.values()} == {"TrialError"}


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([1, 2], 3),
        ([2**60 + 1, 2**60 + 2], 2**61 + 3),
        ([-5, 2], -3),
        ([0.5, 1.0], 1.5),
        ([0, 1.5], 1.5),  # a rank without a batch never left its initial 0
        ([0, torch.tensor(4)], (4, torch.tensor(4))),
        ([True, True], 2),
        ([np.float32(0.5), np.float32(2)], np.float32(2.5)),
        ([torch.ones(2, 2), torch.ones(2, 2)], torch.full((2, 2), 2.0)),
        ([torch.tensor([True]), torch.tensor([True])], torch.tensor([2])),
        ([{"a": (1, 2.0), "b": []}] * 2, {"a": (2, 4.0), "b": []}),
    ],
)
def test_sum_keeps_types(fleet: Fleet, values: list[Any], total: Any) -> None:
    results = fleet.run(2, "reduce", values)
    for rank, result in enumerate(results):
        want = total[rank] if isinstance(total, tuple) else total
        assert type(result) is type(want)
        if isinstance(want, torch.Tensor):
            assert result.dtype == want.dtype
        close(result, want, rtol=0) if isinstance(want, torch.Tensor) else None
        assert isinstance(want, torch.Tensor) or result == want


def test_mean(fleet: Fleet) -> None:
    assert fleet.run(2, "average", [1, 2], [None, None]) == [1.5, 1.5]
    assert fleet.run(2, "average", [1.0, 4.0], [2, 1]) == [2.0, 2.0]
    assert fleet.run(2, "average", [float("nan"), 4.0], [0, 1]) == [4.0, 4.0]
    result = fleet.run(2, "average", [{"a": torch.tensor([1, 2])}] * 2, [1, 3])[0]
    close(result["a"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("members", [[0], [0, 1]])
@pytest.mark.parametrize("value", ["low", None, 1j, 10**30])
@pytest.mark.parametrize("job", ["reduce", "average"])
def test_what_is_no_number_is_refused(
    fleet: Fleet, members: list[int], value: Any, job: str
) -> None:
    arguments = [[{"loss": value}] * 2, [None] * 2][: 1 if job == "reduce" else 2]
    results = fleet.pool.run(fleet.calls(members, job, *arguments))
    assert {result.kind for result in results.values()} == {"FleetConfigError"}
    assert all("value['loss']" in result.text for result in results.values())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, int),
        (2**62, int),
        (0.1, float),
        (True, int),
        (np.float32(0.1), np.float32),
        (np.ones(2), np.ndarray),
        (torch.tensor(0.1), torch.float32),
        (torch.tensor([2], dtype=torch.int16), torch.int16),
        (torch.tensor([True]), torch.int64),
        (torch.tensor(0.1, dtype=torch.float16), torch.float16),
    ],
)
def test_alone_a_sum_has_the_type_it_has_in_a_group(fleet: Fleet, value: Any, kind: Any) -> None:
    alone, other = fleet.run(1, "reduce", [value])[0], fleet.run(2, "reduce", [value, value])[0]
    for result in (alone, other):
        assert (result.dtype if isinstance(result, torch.Tensor) else type(result)) is kind
    assert (alone == value) if np.ndim(value) == 0 else (alone == value).all()


@pytest.mark.parametrize("value", [3, 0.1, True, torch.tensor([1, 2]), np.float32(0.1)])
@pytest.mark.parametrize("weight", [None, 3.0, 0.0])
def test_alone_a_mean_is_what_it_is_in_a_group(fleet: Fleet, value: Any, weight: Any) -> None:
    alone = fleet.run(1, "average", [value], [weight])[0]
    other = fleet.run(2, "average", [value] * 2, [weight] * 2)[0]
    assert type(alone) is type(other)
    torch.testing.assert_close(alone, other, equal_nan=True)
    exact = torch.as_tensor(alone) == torch.as_tensor(value)
    assert bool(exact.all()) is (weight != 0.0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", ["all_reduce_sum", "mean"])
def test_what_is_reduced_carries_no_gradient(fleet: Fleet, world_size: int, what: str) -> None:
    assert fleet.run(world_size, "grad_of", what) == [(False, False)] * world_size


def test_buffers_of_every_type_are_made_equal(fleet: Fleet) -> None:
    for buffers in fleet.run(2, "odd_buffers"):
        for name, buffer in buffers.items():
            assert (buffer == (1 if name == "bool" else 3)).all(), name


@pytest.mark.parametrize("how", ["train", "norm last"])
def test_a_gradient_penalty_through_batchnorm_says_what_to_do(fleet: Fleet, how: str) -> None:
    results = fleet.pool.run(fleet.calls([0, 1], "penalty", how))
    for result in results.values():
        assert result.kind == "TrialError"
        assert "policy='baseline'" in result.text


@pytest.mark.parametrize("how", ["none", "eval"])
def test_graphs_of_gradients_that_nobody_differentiates_are_welcome(
    fleet: Fleet, how: str
) -> None:
    for rank in fleet.run(2, "penalty", how):
        assert all(grad.isfinite().all() for grad in rank)


def test_sum_refuses_unlike_structures(fleet: Fleet) -> None:
    results = fleet.pool.run(fleet.calls([0, 1], "reduce", [{"a": 1}, {"a": 1, "b": 1}]))
    assert {result.kind for result in results.values()} == {"TrialError"}


def test_groups_are_formed_anew(fleet: Fleet) -> None:
    divisions = [[[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2]]]
    for division in divisions * 3:
        calls = {}
        for members in division:
            calls |= fleet.calls(members, "ranks_sum")
        sizes = {member: len(members) for members in division for member in members}
        results = fleet.pool.run(calls)
        assert results == {m: (k, k * (k + 1) / 2) for m, k in sizes.items()}


def test_groups_leave_nothing_behind(fleet: Fleet) -> None:
    for seen in fleet.run(2, "resources", 12):
        assert all(hook for *_, hook in seen)
        assert max(files for files, *_ in seen[6:]) <= seen[3][0] + 2
        assert seen[-1][1] <= seen[3][1]


def test_rng_of_every_rank(fleet: Fleet) -> None:
    results = fleet.run(2, "rng")
    for before, again, leaders in results:
        assert again == before
        assert leaders == results[0][0]
    assert results[0][0] != results[1][0]


@pytest.mark.parametrize("job", ["reduce_forever", "backward_forever"])
def test_survivors_of_a_killed_peer_form_a_group(
    job: str, nursery: Nursery, tmp_path: Path
) -> None:
    fleet = Fleet(nursery)
    for member, call in fleet.calls([0, 1, 2], job, str(tmp_path)).items():
        fleet.pool.start(member, *call)
    while len(list(tmp_path.iterdir())) < 3:
        assert not fleet.pool.pipes[0].poll(0.05)
    fleet.pool.kill(1)
    for member in (0, 2):
        assert fleet.pool.result(member).kind in ("RuntimeError", "DistBackendError")
    results = fleet.pool.run(fleet.calls([0, 2], "ranks_sum"))
    assert results == {0: (2, 3.0), 2: (2, 3.0)}
    fleet.pool.close()


@pytest.mark.skipif(not groups.CAN_SHUT_DOWN, reason="such processes end: `can_leave_alone`")
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


def test_alone_nothing_is_reduced() -> None:
    assert collectives.all_reduce_sum({"a": 1}) == {"a": 1}
    assert collectives.mean(3) == 3
    groups.leave_group()


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", [1.0, 2.0]])
def test_a_weight_that_makes_no_sense_is_refused(weight: Any) -> None:
    with pytest.raises(FleetConfigError, match="`weight` is"):
        collectives.mean(1.0, weight)
    with pytest.raises(FleetConfigError, match="`weight` is"):
        collectives.one_weight(weight)


def test_group_of_one_has_no_network() -> None:
    spec = GroupSpec(
        rank=0, world_size=1, prefix="x", store_host="nowhere.invalid", store_port=None
    )
    for _ in range(2):
        groups.join_group(spec, "gloo", timeout_s=5)
        assert groups.group_size() == 1
        groups.leave_group()


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


def test_to_device_copies_containers() -> None:
    data = {"x": torch.ones(1), "y": (torch.zeros(1), "label")}
    moved = nested.to_device(data, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["y"][0].is_meta
    assert moved["y"][1] == "label"


@pytest.mark.filterwarnings("ignore:Local rank information")
def test_ignite_goes_by_the_present_group() -> None:
    idist = pytest.importorskip("ignite.distributed")
    spec = GroupSpec(rank=0, world_size=1, prefix="ignite", store_host="", store_port=None)
    for _ in range(2):
        groups.join_group(spec, "gloo", timeout_s=5)
        assert idist.model_name() == "native-dist"
        groups.leave_group()
        assert idist.model_name() == "serial"
