"""What data sets have of a DataLoader: many samples at once, `set_epoch`, `get_worker_info`.

And what they may not have: randomness that no seed repeats, which is found and told.
"""

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


def read(client: Any, name: str, epoch: int = 0, batch_size: int = 7) -> list[Any]:
    """The samples of an epoch, as plain numbers and tuples."""
    batches = client.read(name, epoch=epoch, batch_size=batch_size)
    return [plain(sample) for batch in batches if batch.local_size for sample in batch.data]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value


def everywhere(data: dict[str, Any], epochs: Any = range(2), **options: Any) -> dict[str, Any]:
    """By data set, what its epochs are, which may not depend on processes, chunks and batches."""

    def all_of(client: Any, batch_size: int = 7) -> dict[str, Any]:
        return {name: [read(client, name, e, batch_size) for e in epochs] for name in data}

    wanted = all_of(SharedPipeline(**data, **options, collate_fn=list).inline())
    for number, chunk_bytes, batch_size in ((1, 1 << 20, 64), (2, 300, 7)):
        pipeline = SharedPipeline(**data, **options, collate_fn=list)
        with serving(pipeline, num_preprocessors=number, chunk_bytes=chunk_bytes) as agent:
            found = all_of(agent.client(), batch_size)
            assert {name for name in data if found[name] != wanted[name]} == set()
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


class Alone(Numbered):
    """The same without `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(len(dataset))
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


KINDS = (Table, Yielding, Drawing, Padding, Neighbours)
TABLES: dict[str, Any] = {
    f"{name}_{kind.__name__}": wrap(kind())
    for kind in KINDS
    for name, wrap in {
        "train": lambda d: d,
        "train_part": lambda d: Subset(d, range(N - 1, 0, -1)),
        "train_several": lambda d: ConcatDataset([d]),
    }.items()
}


def test_no_data_set_is_read_many_at_once_unasked() -> None:
    alone = SharedPipeline(**{n: Alone(d) for n, d in TABLES.items()}, collate_fn=list).inline()
    with serving(SharedPipeline(**TABLES, collate_fn=list)) as agent:
        client = agent.client()
        assert [n for n in TABLES if read(client, n, 1) != read(alone, n, 1)] == []


def test_samples_read_at_once_are_the_same_everywhere() -> None:
    tables = {name: table for name, table in TABLES.items() if "several" not in name}
    found = everywhere(tables | {"val": Table(), "test": Drawing()}, batched=True)
    assert all(found[name][0] != found[name][1] for name in tables)
    assert found["val"] == [[*range(N)]] * 2


def test_samples_that_come_twice_are_drawn_twice() -> None:
    order = [5, 5, 7, *range(40), 5, 9]
    (epoch, _) = everywhere({"train": Drawing()}, sampler=order, batched=["train"])["train"]
    assert [sample[0] for sample in epoch] == order
    assert len(set(epoch)) == len(order)


@pytest.mark.parametrize(
    "stages", [{}, {"prepare": lambda i: [i]}, {"augment": lambda i: (i, random.random())}]
)
def test_reading_at_once_takes_few_calls(stages: Any) -> None:
    wanted = read(SharedPipeline(train=Table(), collate_fn=list, **stages).inline(), "train", 1)
    COUNTS[SWITCH] = 0
    pipeline = SharedPipeline(train=Table(), collate_fn=list, batched="train", **stages)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert read(agent.client(), "train", 1) == wanted
    # Some samples are made again: the first, as a check, and what is timed for the decoded store.
    assert 0 < COUNTS[SWITCH] <= 4 + N // 32 + 1


class Failing(Table):
    def __getitem__(self, index: int) -> Any:
        if index == 37:
            raise RuntimeError("broken row")
        return index


class Short(Table):
    def __getitems__(self, wanted: list[int]) -> Any:
        return super().__getitems__(wanted)[1:]


def test_what_raises_among_many_is_told_or_skipped() -> None:
    pipeline = SharedPipeline(val=Failing(), test=Short(), batched=True)
    with serving(pipeline) as agent:
        client = agent.client()
        for name, words in {
            "val": "or one that is read with it, raised RuntimeError: broken row",
            "test": "__getitems__ gave 31 samples for 32 indices",
        }.items():
            with pytest.raises(PreprocessingError, match=words):
                read(client, name)
    found = everywhere({"val": Failing()}, [0], batched=True, on_error="skip")
    assert found["val"] == [[*range(37), 38, *range(38, N)]]


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
def test_batched_that_can_not_be(given: Any, words: str) -> None:
    with pytest.raises(FleetConfigError, match=words):
        SharedPipeline(train=Table(), val=Numbered(), batched=given)


# -- set_epoch ------------------------------------------------------------------------------------


class Curriculum(Numbered):
    epoch: Any = None

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


def test_data_sets_are_told_the_epoch() -> None:
    data = {}
    for kind in (Curriculum, Redrawn, TableOfEpochs):
        shared = kind()  # by training data and by data that have one epoch only
        for name in ("train", "val"):
            data[f"{name}_{kind.__name__}"] = shared
            data[f"{name}_part_{kind.__name__}"] = Subset(shared, range(40))
            data[f"{name}_parts_{kind.__name__}"] = ConcatDataset(
                [Subset(shared, [3, 4]), Numbered(20), shared]
            )
    at_once = ["train_TableOfEpochs", "val_part_TableOfEpochs"]
    for name, epochs in everywhere(data, [0, 1, 5], batched=at_once).items():
        seen = [{each[1] for each in epoch if isinstance(each, tuple)} for epoch in epochs]
        if "Redrawn" in name:
            assert [len(each) for each in seen] == [1] * 3
            assert len(set.union(*seen)) == (3 if name.startswith("train") else 1)
        else:
            assert seen == ([{0}, {1}, {5}] if name.startswith("train") else [{0}] * 3)


class Refusing(Curriculum):
    def set_epoch(self, epoch: int) -> None:
        raise ValueError("no such epoch")


def test_what_goes_wrong_with_epochs_is_told() -> None:
    with pytest.raises(FleetConfigError, match="is not the same each time"):
        SharedPipeline(train=Curriculum(), augment=lambda sample: sample).packed().setup(1)
    with (
        serving(SharedPipeline(train=Refusing())) as agent,
        pytest.raises(PreprocessingError, match="ValueError: no such epoch"),
    ):
        read(agent.client(), "train")


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


def test_data_sets_are_informed_as_by_the_one_worker() -> None:
    part = Subset(Informed(), range(40))
    found = everywhere({"train": Informed(), "val": Informed(), "train_part": part})
    (first, later), (val, _), (some, _) = found.values()
    for samples in (first + later + val, some):
        assert {sample[1:3] for sample in samples} == {(0, 1)}
        assert len({sample[4] for sample in samples}) == len(samples)

    def prepare(index: int) -> Any:
        return index, get_worker_info().num_workers

    def augment(sample: Any) -> Any:
        return *sample, get_worker_info().seed

    everywhere({"train": Numbered()}, prepare=prepare, augment=augment)
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


def test_unseeded_randomness_is_told_of_once() -> None:
    unseeded = (Fresh, Kept, Bytes, Counting, Objects, FreshTable)
    data = {f"{name}_{kind.__name__}": kind() for name in ("train", "val") for kind in unseeded}
    at_once = ["train_FreshTable", "val_FreshTable"]
    with serving(SharedPipeline(**data, collate_fn=list, batched=at_once)) as agent:
        client = agent.client()
        for name in data:
            for epoch in range(2):
                assert sum(b.local_size for b in client.read(name, epoch=epoch, batch_size=7)) == N
        notices = agent.notices()
    assert len(notices) == len(data)
    for name in data:
        (notice,) = [each for each in notices if f"data set '{name}' came out otherwise" in each]
        assert "torch.initial_seed()" in notice


def noisy(index: int) -> int:
    return index * os.urandom(8)[0]


def test_unseeded_augmentation_is_told_of_in_the_log(capfd: Any) -> None:
    with SharedPipeline(train=Numbered(), augment=noisy, num_preprocessors=1) as pipeline:
        for _ in pipeline.batches("train", batch_size=7, epoch=0):
            pass
    told = capfd.readouterr().err
    assert told.count("'train' came out otherwise when it was made again") == 1


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


def nameless() -> type[Thing]:
    class Nameless(Thing):
        """One of a script's own, which is pickled by value."""

    return Nameless


NAMELESS = nameless()


class OfTheScript(Numbered):
    def __getitem__(self, index: int) -> Any:
        return {"thing": NAMELESS(index), "x": torch.full((3,), float(index))}


class Late(Numbered):
    """Raises when the first sample is made a second time."""

    def __getitem__(self, index: int) -> Any:
        COUNTS[index] += 1
        if COUNTS[index] == 2:
            raise OSError("of the moment")
        return index


def test_nothing_is_told_of_others() -> None:
    kinds = (Seeded, Odd, OfTheScript, Late, Curriculum, Informed, Table)
    data = {f"train_{kind.__name__}": kind() for kind in kinds}
    pipeline = SharedPipeline(**data, collate_fn=list)
    with serving(pipeline, num_preprocessors=1) as agent:
        client = agent.client()
        for name in data:
            assert sum(batch.local_size for batch in client.read(name, epoch=0, batch_size=7)) == N
        assert agent.notices() == []
