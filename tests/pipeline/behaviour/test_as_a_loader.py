"""What data sets have of a DataLoader: many samples at once, `set_epoch`, `get_worker_info`.

And what they may not have: randomness that no seed repeats, which is found and told.
"""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_datasets import COUNTS, GENERATORS, SWITCH, Made
from pipeline_harness import draw, everywhere, samples, serving
from standalone_harness import read
from torch.utils.data import ConcatDataset, Subset, get_worker_info

from optuna_fleet import FleetConfigError, SharedPipeline
from optuna_fleet.exceptions import PreprocessingError

N = 150
U8 = torch.uint8


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


TABLES: dict[str, Any] = {
    f"{name}_{kind.__name__}": wrap(kind())
    for kind in (Table, Yielding, Drawing, Neighbours)
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
        assert [n for n in TABLES if samples(client, n, 1) != samples(alone, n, 1)] == []


def test_samples_read_at_once_are_the_same_everywhere() -> None:
    tables = {name: table for name, table in TABLES.items() if "several" not in name}
    found = everywhere(tables | {"val": Table(), "test": Drawing()}, batched=True)
    assert all(found[name][0] != found[name][1] for name in tables)
    assert found["val"] == [[*range(N)]] * 2
    order = [5, 5, 7, *range(40), 5, 9]  # what comes twice is drawn twice
    (epoch, _) = everywhere({"train": Drawing()}, sampler=order, batched=["train"])["train"]
    assert [sample[0] for sample in epoch] == order
    assert len(set(epoch)) == len(order)


@pytest.mark.parametrize(
    "stages", [{}, {"prepare": lambda i: [i]}, {"augment": lambda i: (i, random.random())}]
)
def test_reading_at_once_takes_few_calls(stages: Any) -> None:
    wanted = samples(SharedPipeline(train=Table(), collate_fn=list, **stages).inline(), epoch=1)
    COUNTS[SWITCH] = 0
    pipeline = SharedPipeline(train=Table(), collate_fn=list, batched="train", **stages)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert samples(agent.client(), epoch=1) == wanted
    # The first is made again, as a check, and what is timed for the decoded store.
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
    with serving(SharedPipeline(val=Failing(), test=Short(), batched=True)) as agent:
        for name, words in {
            "val": "or one that is read with it, raised RuntimeError: broken row",
            "test": "__getitems__ gave 31 samples for 32 indices",
        }.items():
            with pytest.raises(PreprocessingError, match=words):
                samples(agent.client(), name)
    found = everywhere({"val": Failing()}, [0], batched=True, on_error="skip")
    assert found["val"] == [[*range(37), 38, *range(38, N)]]


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
            data[f"{name}_parts_{kind.__name__}"] = ConcatDataset(
                [Subset(shared, [3, 4]), Numbered(20), shared]
            )
    at_once = ["train_TableOfEpochs", "val_TableOfEpochs"]
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
    error = pytest.raises(PreprocessingError, match="ValueError: no such epoch")
    with serving(SharedPipeline(train=Refusing())) as agent, error:
        samples(agent.client())


# -- get_worker_info and generators ---------------------------------------------------------------


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
    for each in (first + later + val, some):
        assert {sample[1:3] for sample in each} == {(0, 1)}
        assert len({sample[4] for sample in each}) == len(each)

    def prepare(index: int) -> Any:
        return index, get_worker_info().num_workers

    def augment(sample: Any) -> Any:
        return *sample, get_worker_info().seed

    everywhere({"train": Numbered()}, prepare=prepare, augment=augment)
    assert get_worker_info() is None


class Noise:
    """Draws from generators that it keeps."""

    def __init__(self, *generators: Any) -> None:
        self.generators = generators

    def __call__(self, index: int) -> Any:
        return index, *map(draw, self.generators)


class Noisy(Numbered):
    def __init__(self, *generators: Any) -> None:
        super().__init__(24)
        self.noise = Noise(*generators)

    def __getitem__(self, index: int) -> Any:
        return self.noise(index)


def test_own_generators_are_seeded_for_each_sample_in_data_sets_and_stages() -> None:
    noises = {f"train_{kind}": Noise(new(), new()) for kind, new in GENERATORS.items()}
    found = everywhere({name: Noisy(*each.generators) for name, each in noises.items()}, (0, 1, 0))
    for first, other, again in found.values():
        assert first == again
        drawn = [number for _, *numbers in first + other for number in numbers]
        assert len(set(drawn)) == len(drawn) == 4 * 24
    in_parts = everywhere(dict.fromkeys(noises, Numbered(24)), (0, 1, 0), augment=noises)
    assert in_parts == found


# -- randomness that no seed repeats --------------------------------------------------------------


class Kept(Numbered):
    """A generator that is seeded, but made at first use: each process goes on by itself."""

    rng = None

    def __getitem__(self, index: int) -> Any:
        self.rng = self.rng or np.random.default_rng(0)
        return self.rng.random()


class Thing:
    """Equals nothing but itself."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class FreshTable(Table):
    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random()


UNSEEDED: dict[str, Any] = {
    "train_fresh": Made(lambda i: np.random.default_rng().random()),
    "train_kept": Kept(),
    "train_bytes": Made(lambda i: {"x": [torch.frombuffer(bytearray(os.urandom(8)), dtype=U8)]}),
    "train_objects": Made(lambda i: Thing(i, torch.from_numpy(np.random.default_rng().random(3)))),
    "train_table": FreshTable(),
}


class Seeded(Numbered):
    """Draws from all that is seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        own = np.random.default_rng(torch.initial_seed()).random()
        return torch.rand(2), np.random.rand(), random.random(), self.rng.random(), own


def odd(index: int) -> Any:
    """What is hard to compare, but always the same."""
    ragged = np.array([index, None, "text"], dtype=object)
    return Thing(index, {"a", "b"}), float("nan"), ragged, torch.eye(3).to_sparse(), {index}


def nameless() -> type[Thing]:
    class Nameless(Thing):
        """One of a script's own, which is pickled by value."""

    return Nameless


NAMELESS = nameless()


def late(index: int) -> int:
    """Raises when a sample is made a second time."""
    COUNTS[index] += 1
    if COUNTS[index] == 2:
        raise OSError("of the moment")
    return index


OTHERS: dict[str, Any] = {
    **{f"train_{kind.__name__}": kind() for kind in (Seeded, Curriculum, Informed, Table)},
    "train_odd": Made(odd),
    "train_of_script": Made(lambda i: {"thing": NAMELESS(i), "x": torch.full((3,), float(i))}),
    "train_late": Made(late),
}


def test_unseeded_randomness_is_told_of_once_and_nothing_of_others() -> None:
    data = UNSEEDED | OTHERS
    pipeline = SharedPipeline(**data, collate_fn=list, batched=["train_table"])
    with serving(pipeline, num_preprocessors=1) as agent:
        client = agent.client()
        for name in data:
            for epoch in range(1 if "late" in name else 2):
                assert sum(b.local_size for b in client.read(name, epoch=epoch, batch_size=7)) == N
        notices = agent.notices()
    assert len(notices) == len(UNSEEDED)
    for name in UNSEEDED:
        assert sum(f"'{name}' came out otherwise" in each for each in notices) == 1


def noisy(index: int) -> int:
    return index * os.urandom(8)[0]


def test_unseeded_augmentation_is_told_of_in_the_log(capfd: Any) -> None:
    with SharedPipeline(train=Numbered(), augment=noisy, num_preprocessors=1) as pipeline:
        read(pipeline)
    assert capfd.readouterr().err.count("'train' came out otherwise") == 1
