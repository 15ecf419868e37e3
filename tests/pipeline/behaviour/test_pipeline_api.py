"""What a SharedPipeline is made of, what it says of that, and what it refuses."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import h5py
import numpy as np
import pytest
import torch
from pipeline_datasets import Counted, Made, Ragged
from pipeline_harness import Agent, serving, shard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from optuna_fleet import FleetConfigError, FleetError, SharedPipeline


def test_a_pipeline_describes_its_data_sets() -> None:
    pipeline = SharedPipeline(train_a=Counted(3), val=[1, 2], seed=5, collate_fn={"val": list})
    spec = pickle.loads(pickle.dumps(pipeline.spec()))
    assert [(d.name, d.num_samples, d.shuffled) for d in spec.datasets] == [
        ("train_a", 3, True),
        ("val", 2, False),
    ]
    assert (spec.seed, spec.dataset("train_a").collate) == (5, None)
    assert cloudpickle.loads(spec.dataset("val").collate) is list
    assert list(pipeline.payload().load().datasets) == ["train_a", "val"]


@pytest.mark.parametrize(
    ("names", "shuffled", "told"),
    [
        (["train", "val"], ["val"], [False, True]),
        (["fold0", "fold1"], ["fold1"], [False, True]),
        *[
            (["train_0", name], None, [True, False])
            for name in ("val", "val_2", "validation", "test", "test0", "eval", "valid")
        ],
    ],
)
def test_which_data_sets_are_shuffled(names: list[str], shuffled: Any, told: list[bool]) -> None:
    spec = SharedPipeline(**{name: [1] for name in names}, shuffled=shuffled).spec()
    assert [each.shuffled for each in spec.datasets] == told


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Any:
        return iter(int, 1)


class Stream(IterableDataset[int]):
    def __init__(self, n: int = 1) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        return iter(range(self.n))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "at least one data set"),
    ({"train": iter([1])}, "map-style"),
    ({"train": []}, "'train' is empty"),
    ({"train": "folder"}, "'folder' is none"),
    ({"train": {"a": 1}}, "'train' is of type dict"),
    ({"train": DataLoader([1])}, r"SharedPipeline.from_dataloader\(train=loader\)"),  # type: ignore[arg-type]
    ({"val": None}, "None is none"),
    ({"collate_fn": 3}, "collate_fn of data set 'train' is 3"),
    ({"collate_fn": {"vla": list}}, "names 'vla'.*'train'"),
    ({"shuffled": ["vla"]}, "names 'vla'"),
    ({"shuffled": True}, "`shuffled` is True"),
    ({"fold0": [1]}, r"'fold0' for training\?.*\['train', 'fold0'\].*=\['train'\] where"),
    ({"num_preprocessors": 0}, "`num_preprocessors` is 0"),
    ({"num_preprocessors": 10**30}, "a whole number >= 1 and <= 10000"),
    ({"memory_bytes": 1.5}, "`memory_bytes` is 1.5"),
    ({"seed": "x"}, "`seed` is 'x'"),
    ({"on_error": ["skip"]}, "`on_error` is .*, but must be 'raise' or 'skip'"),
    ({"spill_dir": 3}, "`spill_dir` is 3, but must be the path of a folder"),
    ({"shuffle": True}, "`shuffle` is no option.*: `shuffled` takes the names"),
    ({"spil_dir": "/tmp"}, "`spil_dir` is no option.*did you mean `spill_dir`"),
    ({"shuffled": [], "bached": ["train"]}, "`bached` is no option.*did you mean `batched`"),
    ({"shuffled": [], "weights": [0.5] * 8}, "`weights` is no option.*WeightedRandomSampler"),
    ({"batch_size": 32}, "given to trial.batches"),
    ({"batch_sampler": BatchSampler([1], 1, False)}, "`batch_sampler` is no .*single indices"),
    ({"worker_init_fn": print}, "`worker_init_fn` is no .*__setstate__.*each"),
    ({"batched": True}, "'train' is of type list, which has none"),
    ({"batched": ["val"]}, "`batched` names 'val', but"),
    ({"batched": 32}, "value of `batched` is 32, but must be True for all, or names of data sets"),
    ({"sampler": DistributedSampler([1] * 9, 3, 0)}, "one rank's share. Leave it out"),  # type: ignore[arg-type]
    ({"sampler": Endless()}, r"is a Endless, but must be .* with a len\(\)"),
    ({"sampler": []}, r"a list with a len\(\) of 0"),
    ({"sampler": {"trian": [0]}}, "`sampler` names 'trian'"),
    ({"sampler": [0], "shuffled": []}, "For which data set is `sampler`.*{'train': ...}"),
    ({"sampler": [0], "train": Stream()}, "'train' is a stream.*leave out its `sampler`"),
    ({"train": Stream(0)}, "'train' is empty"),
    ({"shards": 0}, "`shards` is 0"),
    ({"train": Stream(), "batched": ["train"]}, "'train' is of type Stream, which has none"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_arguments_that_can_not_work(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetConfigError, match=message):
        SharedPipeline(**({"train": [1], **given} if given else {}))


def test_data_sets_must_have_names() -> None:
    with pytest.raises(FleetConfigError, match=r"by name: .*1 without a name"):
        SharedPipeline([1])


def test_opened_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    error = pytest.raises(FleetConfigError, match=r"h5py.*in the __getitem__ .*__getstate__")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["images"] = np.arange(10)
        with pytest.raises(FleetConfigError, match=r"'val' is of type File, but .* map-style"):
            SharedPipeline(val=file)
        with error:
            SharedPipeline(val=file["images"]).packed()
    with open(tmp_path / "text", "w") as text:
        named = r"`val\.make`, given to SharedPipeline, is of type .*when it is first used"
        with pytest.raises(FleetConfigError, match=named):
            SharedPipeline(val=Made(text.read)).packed()
        with pytest.raises(FleetConfigError, match="'val' is of type TextIOWrapper, but"):
            SharedPipeline(val=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": 1 << 50}, r"memory_bytes=\d+, but only \d+ bytes of memory"),
        ({"spill_dir": "nowhere"}, r"spill_dir='.*nowhere'.*existing folder"),
        ({"spill_dir": "file"}, r"spill_dir='.*file'.*existing folder"),
        ({"spill_dir": ".", "memory_bytes": 1 << 60}, r"only \d+ bytes are free in spill_dir='"),
    ],
)
def test_what_the_machine_has_not_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").touch()
    if "spill_dir" in options:
        options = {**options, "spill_dir": tmp_path / options["spill_dir"]}
    with pytest.raises(FleetConfigError, match=message):
        SharedPipeline(val=Counted(3), **options).packed()


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "test"}, "no data set 'test'.*'train', 'val'"),
        ({"name": torch.ones(2)}, "must be the name of a data set"),
        ({"drop_last": "no"}, "`drop_last` is 'no', but must be True or False"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"batch_size": 2.0}, "`batch_size` is 2.0"),
        ({"epoch": -1}, "`epoch` is -1"),
        ({"rank": 2, "world_size": 2}, "`rank` is 2"),
        ({"name": "val", "batch_size": 21, "drop_last": True}, "20 samples gives no batch at all"),
    ],
)
def test_reads_that_can_not_work(agent: Agent, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetConfigError, match=message):
        agent.client().read(**{"name": "train", "epoch": 0, "batch_size": 4, **arguments})


def test_drop_last_and_first_step_leave_out_batches(agent: Agent) -> None:
    client = agent.client()

    def read(**more: Any) -> list[list[int]]:
        batches = client.read("train", epoch=0, batch_size=40, **more)
        return [batch.data[1].tolist() for batch in batches]

    everything = read()
    assert [len(batch) for batch in everything] == [40, 40, 40, 30]
    assert read(drop_last=True) == everything[:3]
    assert read(first_step=2) == everything[2:]
    assert read(first_step=4) == []


def test_collate_fn_and_ragged_samples() -> None:
    pipeline = SharedPipeline(
        train=Ragged(20),
        plain=Ragged(20),
        shuffled=["train"],
        collate_fn={"train": torch.nn.utils.rnn.pad_sequence},
    )
    with serving(pipeline) as agent:
        client = agent.client()
        (batch,) = client.read("train", epoch=0, batch_size=20)
        assert batch.data.shape == (3, 20)
        assert [b.data.tolist() for b in client.read("plain", epoch=0, batch_size=1)] == [
            [[i] * (i % 3 + 1)] for i in range(20)
        ]
        with pytest.raises(RuntimeError, match=r"equal size.*SharedPipeline\(collate_fn=\.\.\.\)"):
            next(iter(client.read("plain", epoch=0, batch_size=2)))


def test_agent_gone() -> None:
    agent = Agent(SharedPipeline(train=Counted(4)))
    client = agent.client()
    iterator = iter(client.read("train", epoch=0, batch_size=2))
    next(iterator)
    with agent.killed():
        with pytest.raises(FleetError, match="agent of this node"):
            list(client.read("train", epoch=0, batch_size=2))
        iterator.close()  # nobody to tell, and no reason to raise


def test_shares_cover_the_batch_and_differ_by_one_sample() -> None:
    for size in range(12):
        for world_size in range(1, 6):
            shards = [shard(size, rank, world_size) for rank in range(world_size)]
            assert [i for start, stop in shards for i in range(start, stop)] == list(range(size))
            lengths = [stop - start for start, stop in shards]
            assert lengths == sorted(lengths, reverse=True)
            assert max(lengths) - min(lengths) <= 1


# -- of DataLoaders -------------------------------------------------------------------------------

DATA: Any = [(torch.full((2,), float(i)), i) for i in range(40)]


def labels(pipeline: SharedPipeline, name: str = "train", epoch: int = 0) -> list[int]:
    batches = pipeline.inline().read(name, epoch=epoch, batch_size=7)
    return [int(label) for batch in batches for label in batch.data[1]]


def in_pairs(rows: list[Any]) -> Any:
    return torch.stack([row for row, _ in rows]) * 2, [label for _, label in rows]


@pytest.mark.parametrize("collate_fn", [None, in_pairs])
def test_what_is_not_shuffled_comes_as_from_the_loader(collate_fn: Any) -> None:
    loader: Any = DataLoader(Subset(DATA, range(3, 40)), batch_size=7, collate_fn=collate_fn)
    client = SharedPipeline.from_dataloader(train=loader).inline()
    for epoch in range(2):
        ours = client.read("train", epoch=epoch, batch_size=7)
        for batch, (rows, numbers) in zip(ours, loader, strict=True):
            assert torch.equal(batch.data[0], rows)
            assert [int(i) for i in batch.data[1]] == [int(i) for i in numbers]


def test_what_is_shuffled_has_a_new_order_in_each_epoch_and_options_go_first() -> None:
    loaders = {"fold": DataLoader(DATA, shuffle=True), "val": DataLoader(DATA)}
    pipeline = SharedPipeline.from_dataloader(**loaders, seed=3)
    orders = [labels(pipeline, "fold", epoch) for epoch in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(40)] == labels(pipeline, "val")
    assert orders[0] == labels(SharedPipeline(fold=DATA, shuffled=["fold"], seed=3), "fold")
    pipeline = SharedPipeline.from_dataloader(**loaders, shuffled=[], collate_fn=in_pairs)
    assert labels(pipeline, "fold", 1) == [*range(40)]


@pytest.mark.parametrize(
    ("sampler", "length"),
    [
        (WeightedRandomSampler([0.0] * 20 + [1.0] * 20, 15), 15),
        (RandomSampler(DATA, replacement=True), 40),
        (RandomSampler(DATA, num_samples=10), 10),
    ],
)
def test_samplers_come_along(sampler: Any, length: int) -> None:
    pipeline = SharedPipeline.from_dataloader(train=DataLoader(DATA, sampler=sampler))
    orders = [labels(pipeline, "train", epoch) for epoch in range(2)]
    assert [len(order) for order in orders] == [length] * 2
    assert orders[0] != orders[1]
    assert not isinstance(sampler, WeightedRandomSampler) or min(Counter(orders[0])) >= 20


class ByLength(BatchSampler):
    """One of the user's."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 1}, "needs at least one DataLoader, by name"),
        ({"train": DATA}, "`train` is of type list, but from_dataloader.. takes DataLoaders"),
        ({"train": DataLoader(DATA), "sed": 1}, "`sed` is of type int, .* you mean .seed."),
        ({"train": DataLoader(DATA, batch_size=None)}, "`batch_sampler` of its own"),
        (
            {"train": DataLoader(DATA, batch_sampler=ByLength(SequentialSampler(DATA), 4, False))},
            "`batch_sampler` .* a batch size of its own",
        ),
        (
            {"train": DataLoader(DATA, worker_init_fn=print)},
            "has a `worker_init_fn` .* each sample is seeded",
        ),
    ],
)
def test_what_can_not_be_shared_is_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(FleetConfigError, match=words):
        SharedPipeline.from_dataloader(**given)
