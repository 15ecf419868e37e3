"""What data sets have of a DataLoader: many samples at once, `set_epoch`, `get_worker_info`.

And what they may not have: randomness that no seed repeats, which is found and told.
"""

import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_datasets import COUNTS, SWITCH
from pipeline_harness import serving
from torch.utils.data import ConcatDataset, Subset, get_worker_info

from optuna_fleet import FleetConfigError, SharedPipeline
from optuna_fleet.exceptions import PreprocessingError

N = 150


def read(client: Any, name: str, epoch: int, batch_size: int = 7) -> list[Any]:
    """The samples of an epoch, as plain numbers and tuples."""
    batches = client.read(name, epoch=epoch, batch_size=batch_size)
    return [plain(sample) for batch in batches if batch.local_size for sample in batch.data]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value


def everywhere(epochs: Any = range(2), **given: Any) -> list[Any]:
    """What is read, which may not depend on processes, chunks and batches; `train` and `val`."""
    inline = SharedPipeline(**given, collate_fn=list).inline()
    names = [name for name in ("train", "val") if name in given]
    asked = list(itertools.product(names, epochs))
    wanted = [read(inline, *each) for each in asked]
    for number, chunk_bytes, batch_size in ((1, 1 << 20, 64), (2, 300, 7)):
        pipeline = SharedPipeline(**given, collate_fn=list)
        with serving(pipeline, num_preprocessors=number, chunk_bytes=chunk_bytes) as agent:
            client = agent.client()
            assert [read(client, *each, batch_size) for each in asked] == wanted
    return wanted


class Numbered:
    """Sample i is i; those below may make more of it."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index


# -- many samples at once -------------------------------------------------------------------------


class Table(Numbered):
    """Gives many samples at once, as data sets of Hugging Face do; counts how often."""

    def __getitems__(self, wanted: list[int]) -> Any:
        COUNTS[SWITCH] += 1
        return [self[index] for index in wanted]


class Yielding(Table):
    def __getitems__(self, wanted: list[int]) -> Any:
        yield from super().__getitems__(wanted)


class Drawing(Table):
    """Draws for all that it is asked for at once."""

    def __getitems__(self, wanted: list[int]) -> Any:
        noise = torch.rand(len(wanted)).tolist()
        return list(zip(wanted, noise, np.random.rand(len(wanted)).tolist(), strict=True))


class Padding(Table):
    """Pads to the longest of what it is asked for; a few are as long, by chance."""

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, wanted: list[int]) -> Any:
        lengths = [8 if i in (0, N // 3, N // 2, N - 1) else 3 + i % 6 for i in wanted]
        return [(i, max(lengths)) for i in wanted]


class Neighbours(Table):
    """A sample says which came with it."""

    def __getitems__(self, wanted: list[int]) -> Any:
        return [(i, min(wanted), len(wanted)) for i in wanted]


@pytest.mark.parametrize("kind", [Table, Yielding, Drawing, Padding, Neighbours])
@pytest.mark.parametrize(
    "wrapped", [lambda d: d, lambda d: Subset(d, range(1, N)), lambda d: ConcatDataset([d])]
)
def test_no_data_set_is_read_many_at_once_unasked(kind, wrapped):
    dataset = wrapped(kind())
    alone = SharedPipeline(train=Alone(dataset), collate_fn=list).inline()
    with serving(SharedPipeline(train=dataset, collate_fn=list)) as agent:
        assert read(agent.client(), "train", 1) == read(alone, "train", 1)


class Alone(Numbered):
    """The same without `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@pytest.mark.parametrize("kind", [Table, Yielding, Drawing, Padding, Neighbours])
@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: Subset(d, range(N - 1, 0, -1))])
def test_samples_read_at_once_are_the_same_everywhere(kind, wrapped):
    dataset = wrapped(kind())
    train, again, val = everywhere(train=dataset, val=dataset, batched=True)[:3]
    assert train != again
    if kind is Table:
        assert val == [dataset[i] for i in range(len(dataset))]


def test_samples_that_come_twice_are_drawn_twice():
    order = [5, 5, 7, *range(40), 5, 9]
    (epoch, _) = everywhere(train=Drawing(), sampler=order, batched=["train"])
    assert [sample[0] for sample in epoch] == order
    assert len(set(epoch)) == len(order)


@pytest.mark.parametrize(
    "stages", [{}, {"prepare": lambda i: [i]}, {"augment": lambda i: (i, random.random())}]
)
def test_reading_at_once_takes_few_calls(stages):
    wanted = read(SharedPipeline(train=Table(), collate_fn=list, **stages).inline(), "train", 1)
    COUNTS[SWITCH] = 0
    pipeline = SharedPipeline(train=Table(), collate_fn=list, batched="train", **stages)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert read(agent.client(), "train", 1) == wanted
    # Some samples are made again: the first, as a check, and what is timed for the decoded store.
    assert 0 < COUNTS[SWITCH] <= 4 + N // 32 + 1


@pytest.mark.parametrize("augment", [None, lambda sample: (sample[0].add_(1), sample[1])])
def test_samples_read_at_once_may_be_written_into(augment):
    dataset = [(torch.full((300,), float(i)), i) for i in range(N)]

    class Rows(Table):
        def __getitem__(self, index: int) -> Any:
            return dataset[index][0].clone(), index

    stages = {} if augment is None else {"augment": augment}
    everywhere(train=Rows(), batched=True, epochs=range(3), **stages)


class Failing(Table):
    def __getitem__(self, index: int) -> Any:
        if index == 37:
            raise RuntimeError("broken row")
        return index


class Short(Table):
    def __getitems__(self, wanted: list[int]) -> Any:
        return super().__getitems__(wanted)[1:]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Failing, "or one that is read with it, raised RuntimeError: broken row"),
        (Short, "__getitems__ gave 31 samples for 32 indices"),
    ],
)
def test_what_raises_among_many_is_told(kind, words):
    with (
        serving(SharedPipeline(val=kind(), batched=True)) as agent,
        pytest.raises(PreprocessingError, match=words),
    ):
        read(agent.client(), "val", 0)


def test_only_what_raises_is_skipped():
    (found,) = everywhere([0], val=Failing(), batched=True, on_error="skip")
    assert found == [*range(37), 38, *range(38, N)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (True, "'val' is of type Numbered, which has none"),
        (["val"], "'val' is of type Numbered, which has none"),
        ("test", "`batched` names 'test', but the SharedPipeline's data sets are 'train', 'val'"),
        (32, "value of `batched` is 32, but must be True for all, or names of data sets"),
        (None, "value of `batched` is None"),
    ],
)
def test_batched_that_can_not_be(given, words):
    with pytest.raises(FleetConfigError, match=words):
        SharedPipeline(train=Table(), val=Numbered(), batched=given)


# -- set_epoch ------------------------------------------------------------------------------------


class Curriculum(Numbered):
    epoch = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


class Redrawn(Curriculum):
    """Draws something for each epoch, from a generator that it keeps and from global ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def set_epoch(self, epoch: int) -> None:
        numbers = np.random.permutation(N), torch.randperm(N), self.rng.permutation(N)
        self.epoch = tuple(int(each[0]) for each in numbers)


class TableOfEpochs(Curriculum, Table):
    pass


@pytest.mark.parametrize("kind", [Curriculum, Redrawn, TableOfEpochs])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda d: d,
        lambda d: Subset(d, range(40)),
        lambda d: ConcatDataset([Subset(d, [3, 4]), Numbered(20), d]),
    ],
)
def test_data_sets_are_told_the_epoch(kind, wrapped):
    shared = kind()  # by training data and by data that have one epoch only
    given = {"train": wrapped(shared), "val": wrapped(shared)}
    batched = kind is TableOfEpochs and hasattr(given["train"], "__getitems__")
    found = everywhere([0, 1, 5], **given, batched=batched)
    epochs = [{each[1] for each in epoch if isinstance(each, tuple)} for epoch in found]
    if kind is Redrawn:
        assert [len(each) for each in epochs] == [1] * 6
        assert len(set.union(*epochs[:3])) == 3
    else:
        assert epochs == [{0}, {1}, {5}, {0}, {0}, {0}]


def test_what_changes_with_the_epoch_is_not_prepared_once():
    with pytest.raises(FleetConfigError, match="is not the same each time"):
        SharedPipeline(train=Curriculum(), augment=lambda sample: sample).packed().setup(1)


def test_an_error_of_set_epoch_is_told():
    class Refusing(Curriculum):
        def set_epoch(self, epoch: int) -> None:
            raise ValueError("no such epoch")

    with (
        serving(SharedPipeline(train=Refusing())) as agent,
        pytest.raises(PreprocessingError, match="ValueError: no such epoch"),
    ):
        read(agent.client(), "train", 0)


# -- get_worker_info ------------------------------------------------------------------------------


class Informed(Numbered):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.seed == torch.initial_seed()
        assert type(info.dataset) in (Informed, Subset)
        drawn = np.random.default_rng(info.seed + index).random()
        # As under a DataLoader, it fits into an int64.
        return index, info.id, info.num_workers, drawn, torch.tensor(info.seed).item()


@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: Subset(d, range(40))])
def test_data_sets_are_informed_as_by_the_one_worker(wrapped):
    train, later, val, _ = everywhere(train=wrapped(Informed()), val=wrapped(Informed()))
    assert {sample[1:3] for sample in train + later + val} == {(0, 1)}
    seeds = [sample[4] for sample in train + later + val]
    assert len(set(seeds)) == len(seeds)
    assert get_worker_info() is None


def test_what_is_prepared_is_informed_too():
    def prepare(index: int) -> Any:
        return index, get_worker_info().num_workers

    def augment(sample: Any) -> Any:
        return *sample, get_worker_info().seed

    everywhere(train=Numbered(), prepare=prepare, augment=augment)
    assert get_worker_info() is None


# -- randomness that no seed repeats --------------------------------------------------------------


class Fresh(Numbered):
    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random()


class Kept(Numbered):
    """A generator that is seeded, but made at first use: each process goes on by itself."""

    rng = None

    def __getitem__(self, index: int) -> Any:
        self.rng = self.rng or np.random.default_rng(0)
        return self.rng.random()


class Bytes(Numbered):
    def __getitem__(self, index: int) -> Any:
        return {"x": [torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)]}


class Counting(Numbered):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return index, self.calls


class Thing:
    """Equals nothing but itself."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class Objects(Numbered):
    def __getitem__(self, index: int) -> Any:
        return Thing(index, torch.from_numpy(np.random.default_rng().random(3)))


class FreshTable(Fresh, Table):
    pass


UNSEEDED = [Fresh, Kept, Bytes, Counting, Objects, FreshTable]


@pytest.mark.parametrize("name", ["train", "val"])
@pytest.mark.parametrize("kind", UNSEEDED)
def test_unseeded_randomness_is_told_of_once(kind, name):
    batched = kind is FreshTable
    pipeline = SharedPipeline(**{name: kind()}, collate_fn=list, batched=batched)
    with serving(pipeline) as agent:
        for epoch in range(2):
            for _ in agent.client().read(name, epoch=epoch, batch_size=7):
                pass
        (notice,) = agent.notices()
    assert f"data set '{name}' came out otherwise when it was made again" in notice
    assert "torch.initial_seed()" in notice


def test_unseeded_augmentation_is_told_of():
    pipeline = SharedPipeline(train=Numbered(), augment=lambda i: i * os.urandom(8)[0])
    with serving(pipeline) as agent:
        for _ in agent.client().read("train", epoch=0, batch_size=7):
            pass
        (notice,) = agent.notices()
    assert "'train' came out otherwise" in notice


def test_it_is_told_in_the_log(capfd):
    with SharedPipeline(train=Fresh(), num_preprocessors=1) as pipeline:
        for _ in pipeline.batches("train", batch_size=7, epoch=0):
            pass
    assert capfd.readouterr().err.count("came out otherwise when it was made again") == 1


class Seeded(Numbered):
    """Draws from all that is seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        own = np.random.default_rng(torch.initial_seed()).random()
        return torch.rand(2), np.random.rand(), random.random(), self.rng.random(), own


class Odd(Numbered):
    """What is hard to compare, but always the same."""

    def __getitem__(self, index: int) -> Any:
        ragged = np.array([index, None, "text"], dtype=object)
        return Thing(index, {"a", "b"}), float("nan"), ragged, torch.eye(3).to_sparse(), {index}


class Late(Numbered):
    """Raises when the first sample is made a second time."""

    def __getitem__(self, index: int) -> Any:
        COUNTS[index] += 1
        if COUNTS[index] == 2:
            raise OSError("of the moment")
        return index


@pytest.mark.parametrize("kind", [Seeded, Odd, Late, Curriculum, Informed, Table])
def test_nothing_is_told_of_others(kind):
    with serving(SharedPipeline(train=kind(), collate_fn=list), num_preprocessors=1) as agent:
        for _ in agent.client().read("train", epoch=0, batch_size=7):
            pass
        assert agent.notices() == []


def test_what_is_skipped_is_counted_once():
    with serving(
        SharedPipeline(val=Failing(38), on_error="skip", sampler={"val": [37, 1]})
    ) as agent:
        for _ in agent.client().read("val", epoch=0, batch_size=2):
            pass
        assert agent.stats().num_skipped == 1
