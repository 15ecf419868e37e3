"""order="rolling": one endless stream of each shuffled data set, which passes join anywhere."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
from pipeline_datasets import COUNTS, Augmented, Counted, each_was_made
from pipeline_harness import serving
from torch import nn
from torch.utils.data import Dataset

from optuna_fleet import FleetExecutor
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.chunks.arena import Extents
from optuna_fleet.pipeline.preprocessor.order import permutation
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.server.allocator import PAGE, Space
from optuna_fleet.pipeline.server.store import ChunkStore
from optuna_fleet.pipeline.spec import ChunkKey
from tests.fleets import Leg, fleet_of

N, SEED = 150, 3


def rolling(dataset: Any = None, **more: Any) -> SharedPipeline:
    return SharedPipeline(
        train=dataset or Augmented(N), val=Counted(20), seed=SEED, order="rolling", **more
    )


def collected(batches: Any) -> tuple[list[int], list[float]]:
    """The index and the look of each sample, in order."""
    indices, looks = [], []
    for batch in batches:
        if batch.local_size:
            indices += batch.data[0].tolist()
            looks += batch.data[1][:, 0].tolist()
    return indices, looks


def joined(client: Any, **arguments: Any) -> Any:
    """A pass that begins where the stream is."""
    return client.read("train", **{"epoch": 0, "origin": None, "batch_size": 7, **arguments})


@pytest.mark.parametrize("batch_size", [1, 7, 64, 200])
@pytest.mark.parametrize("origin", [0, 1, 75, 149])
def test_a_pass_from_anywhere_is_the_end_of_an_epoch_and_the_beginning_of_the_next(
    origin: int, batch_size: int
) -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        epochs = [client.read("train", epoch=epoch, batch_size=10) for epoch in (4, 5)]
        (order, first), (again, second) = map(collected, epochs)
        read = client.read("train", epoch=4, origin=origin, batch_size=batch_size)
        indices, looks = collected(read)
    assert order == again == permutation(SEED, "train", 0, N).tolist()
    assert first != second  # augmented anew
    assert indices == order[origin:] + order[:origin]
    assert looks == first[origin:] + second[:origin]


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_of_such_a_pass_are_its_batches(world_size: int) -> None:
    arguments: dict[str, Any] = {"epoch": 1, "origin": 64, "batch_size": 20}
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        whole = client.read("train", **arguments)
        shares = [
            client.read("train", rank=rank, world_size=world_size, **arguments)
            for rank in range(world_size)
        ]
        for batch, *parts in zip(whole, *shares, strict=True):
            assert batch.local_size == batch.global_size
            for leaf, *pieces in zip(batch.data, *(part.data for part in parts), strict=True):
                assert torch.equal(torch.cat(pieces), leaf)


def test_a_pass_may_begin_at_a_later_step() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        arguments: dict[str, Any] = {"epoch": 0, "origin": 100, "batch_size": 7}
        whole, _ = collected(client.read("train", **arguments))
        for step in (3, 10, 21):  # before, behind, and in the last batch behind the end of epoch 0
            rest, _ = collected(client.read("train", first_step=step, **arguments))
            assert rest == whole[7 * step :]


def test_who_joins_goes_along_with_the_others() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        leader, joiner = agent.client(), agent.client()
        ahead = iter(joined(leader))
        for _ in range(15):
            next(ahead)
        epoch, origin = joiner.head("train")
        assert epoch == 0
        assert 15 * 7 - 16 <= origin <= 15 * 7
        indices, _ = collected(joined(joiner))
        assert sorted(indices) == list(range(N))
        assert indices[0] == permutation(SEED, "train", 0, N)[origin]
        collected(ahead)
        made = int(COUNTS[:N].sum())  # instead of 2 * N; some ahead of where the joiner ended
        assert N + origin <= made <= N + origin + 48


def test_epochs_of_a_single_reader_follow_each_other() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        assert client.head("train") == (0, 0)
        epochs = [collected(joined(client, epoch=epoch)) for epoch in range(3)]
        assert [indices for indices, _ in epochs] == 3 * [epochs[0][0]]
        assert epochs[0][1] != epochs[1][1] != epochs[2][1]
        assert client.head("train") == (3, 0)
    assert each_was_made(N, 3)


def test_after_a_pass_that_was_left_the_next_goes_on_behind_it() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        batches = iter(joined(client))
        for _ in range(15):
            next(batches)
        del batches
        epoch, origin = client.head("train")
        assert epoch == 0
        assert 15 * 7 - 8 <= origin <= 15 * 7 + 8


def test_what_is_not_shuffled_does_not_roll() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        client = agent.client()
        assert client.rolls("train")
        assert not client.rolls("val")
        read = client.read("val", epoch=3, batch_size=6)
        assert [i for batch in read for i in batch.data[1].tolist()] == list(range(20))


def test_little_memory_is_enough() -> None:
    with serving(rolling(), chunk_bytes=10_000, memory_bytes=64 << 10) as agent:
        clients = [agent.client() for _ in range(3)]
        passes = [iter(joined(client, batch_size=10)) for client in clients]
        order: list[list[int]] = [[] for _ in passes]
        for step in range(2 * N // 10):  # each joins two batches after the one before
            for number, reading in enumerate(passes):
                if 2 * number <= step < 2 * number + N // 10:
                    order[number] += next(reading).data[0].tolist()
        assert [sorted(indices) for indices in order] == 3 * [list(range(N))]
        stats = agent.stats()
    assert stats.peak_bytes <= 64 << 10
    assert stats.preprocessed <= N + 3 * 40


def test_who_stands_still_does_not_hold_the_stream() -> None:
    with serving(rolling(), chunk_bytes=10_000) as agent:
        still, client = agent.client(), agent.client()
        held = iter(joined(still))
        next(held)
        epochs = [collected(joined(client)) for _ in range(3)]
        assert [sorted(indices) for indices, _ in epochs] == 3 * [list(range(N))]
        looks = [look for _, looks in epochs for look in looks]
        assert len(set(looks)) == 3 * N  # none has the same augmentation again
        del held


def store_with(*chunks: tuple[int, int]) -> ChunkStore:
    """A store that is full of these chunks (epoch, number) and one of fixed data."""
    extents = Extents(memory_bytes=(len(chunks) + 1) * PAGE, disk_begin=1 << 40, disk_bytes=0)
    store = ChunkStore(Space(extents), window=0, fixed=["val"], rolling=True)
    for name in ("train", "val"):
        store.set_size(name, num_samples=4, chunk_size=1, chunk_bytes=PAGE)
    for key in (ChunkKey("val", 0, 0), *(ChunkKey("train", *place) for place in chunks)):
        store.open_pass(("filler", 0), key.name, key.epoch, key.chunk)
        store.request(("filler", 0), key.chunk, urgent=True)
        store.assign()
        store.produced(key, 1)
        store.close_pass(("filler", 0), key.chunk + 1)
    return store


def there(store: ChunkStore) -> set[tuple[int, int]]:
    epochs = (epoch for epoch in store._epochs.values() if epoch.name == "train")
    return {(epoch.number, chunk) for epoch in epochs for chunk in epoch.chunks}


def dropped_for(store: ChunkStore, number: int) -> list[tuple[int, int]]:
    """What goes to make room for so many chunks, one after another."""
    dropped = []
    for epoch in range(10, 10 + number):
        store.open_pass((epoch, 0), "train", epoch, 3)
        store.request((epoch, 0), 3, urgent=True)
        before = there(store)
        store.assign()
        dropped += before - there(store)
    return dropped


def test_the_oldest_epochs_go_first_and_fixed_data_last() -> None:
    store = store_with((0, 0), (0, 1), (1, 0), (1, 1))
    assert store.head("train") == (1, 2)
    assert dropped_for(store, 4) == [(0, 1), (0, 0), (1, 1), (1, 0)]


def test_what_a_follower_comes_to_soonest_goes_last() -> None:
    store = store_with((0, 2), (1, 0), (1, 1), (1, 2))
    store.open_pass(("leader", 0), "train", 1, 3)
    store.open_pass(("follower", 0), "train", 0, 3)
    assert dropped_for(store, 4) == [(0, 2), (1, 2), (1, 1), (1, 0)]


def test_the_head_never_goes_back() -> None:
    store = store_with()
    store.open_pass(("leader", 0), "train", 0, 0)
    store.open_pass(("follower", 0), "train", 0, 0)
    store.move(("leader", 0), 3)
    store.move(("follower", 0), 1)
    assert store.head("train") == (0, 3)
    store.close_pass(("leader", 0))  # its process died
    assert store.head("train") == (0, 3)
    store.open_pass(("beyond", 0), "train", 5, 2 * 4)  # reads chunks, but no epoch
    store.move(("beyond", 0), 2 * 4)
    assert store.head("train") == (0, 3)
    store.close_pass(("follower", 0), 4)
    assert store.head("train") == (1, 0)


# -- as users have it ---------------------------------------------------------------------------


class Indexed(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2), index


def count(trial: Any) -> float:
    """How often each sample came in each epoch, over all ranks."""
    model, optimizer = trial.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters()))
    counts = trial.state.setdefault("counts", [])
    for epoch in trial.epochs(4):
        seen = torch.zeros(60, dtype=torch.float64)
        for x, index in trial.batches("train", batch_size=7 + trial.number):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            seen[index[: trial.shard_size]] += 1
        counts.append(trial.sum(seen).tolist())
        trial.report(0.0, epoch)
    trial.set_user_attr("counts", counts)
    return 0.0


def test_every_epoch_of_every_trial_has_each_sample_once_on_any_number_of_devices() -> None:
    study = optuna.create_study()
    pipeline = SharedPipeline(train=Indexed(), order="rolling")
    with fleet_of(devices=4, pipeline=pipeline) as fleet:
        fleet.script = {
            0: [Leg((0,), 2), Leg((0, 1, 2))],
            1: [Leg((1, 2), 1), Leg((3,), 3), Leg((1, 3))],
            2: [Leg((2,), 1), Leg((2, 3))],
        }
        study.optimize(count, n_trials=3, executor=fleet)
    for trial in study.trials:
        assert trial.user_attrs["counts"] == 4 * [60 * [1.0]]


def elsewhere(client: PipelineClient, name: str) -> tuple[int, int]:
    return 5, 17


def count_apart(trial: Any) -> float:
    """As `count`, where another rank than the first would begin elsewhere."""
    if trial.rank:
        PipelineClient.head = elsewhere  # type: ignore[method-assign]
    return count(trial)


def test_all_ranks_begin_where_the_first_does() -> None:
    study = optuna.create_study()
    pipeline = SharedPipeline(train=Indexed(), order="rolling")
    with fleet_of(devices=3, pipeline=pipeline) as fleet:
        fleet.script = {0: [Leg((0, 1, 2))]}
        study.optimize(count_apart, n_trials=1, executor=fleet)
    assert study.trials[0].user_attrs["counts"] == 4 * [60 * [1.0]]


def test_inline_trials_read_their_own_epochs() -> None:
    study = optuna.create_study()
    executor = FleetExecutor(SharedPipeline(train=Indexed(), order="rolling"), cluster="inline")
    study.optimize(count, n_trials=2, executor=executor)
    for trial in study.trials:
        assert trial.user_attrs["counts"] == 4 * [60 * [1.0]]


def test_alone_a_second_reader_goes_along() -> None:
    with rolling() as pipeline, pipeline.handle().connect() as reader:
        ahead = iter(pipeline.batches("train", batch_size=10, epoch=0))
        for _ in range(10):
            next(ahead)
        order = permutation(SEED, "train", 0, N).tolist()
        indices, _ = next(iter(reader.batches("train", batch_size=10, epoch=0)))
        assert order.index(int(indices[0])) >= 64
        with pytest.raises(FleetConfigError, match="ranks of one trial would read different"):
            reader.batches("train", batch_size=10, epoch=0, world_size=2)
        with pytest.raises(FleetConfigError, match="first_step=3, but with order='rolling'"):
            reader.batches("train", batch_size=10, epoch=0, first_step=3)
        assert len(reader.batches("val", batch_size=10, epoch=0, world_size=2)) == 2


def test_there_are_two_orders() -> None:
    with pytest.raises(FleetConfigError, match="`order` is 'random', but must be 'canonical' or"):
        SharedPipeline(train=Counted(3), order="random")  # type: ignore[arg-type]
