import pickle

import cloudpickle
import pytest
import torch
from pipeline_datasets import Counted, Ragged
from pipeline_harness import Agent, PipelineClient, serving, shard
from torch.utils.data import BatchSampler, DataLoader

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import FleetConfigError, FleetError


def test_spec_describes_the_data_sets():
    pipeline = SharedPipeline(train_a=Counted(3), val=[1, 2], seed=5, collate_fn={"val": list})
    spec = pickle.loads(pickle.dumps(pipeline.spec()))
    assert [(d.name, d.num_samples, d.shuffled) for d in spec.datasets] == [
        ("train_a", 3, True),
        ("val", 2, False),
    ]
    assert spec.seed == 5
    assert spec.dataset("train_a").collate is None
    assert cloudpickle.loads(spec.dataset("val").collate) is list
    assert list(pipeline.payload().load().datasets) == ["train_a", "val"]


def test_shuffled_can_be_chosen():
    spec = SharedPipeline(train=[1], val=[1], shuffled=["val"]).spec()
    assert [d.shuffled for d in spec.datasets] == [False, True]
    spec = SharedPipeline(fold0=[1], fold1=[1], shuffled=["fold1"]).spec()
    assert [d.shuffled for d in spec.datasets] == [False, True]


@pytest.mark.parametrize("name", ["val", "val_2", "validation", "test", "test0", "eval", "valid"])
def test_names_that_tell(name):
    spec = SharedPipeline(train_0=[1], **{name: [1]}).spec()
    assert [d.shuffled for d in spec.datasets] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "at least one data set"),
        ({"train": iter([1])}, "map-style"),
        ({"train": []}, "'train' is empty"),
        ({"train": [1], "collate_fn": 3}, "collate_fn of data set 'train' is 3"),
        ({"train": [1], "collate_fn": {"vla": list}}, "names 'vla'.*'train'"),
        ({"train": [1], "shuffled": ["vla"]}, "names 'vla'"),
        ({"fold0": [1]}, r"'fold0' for training\?.*shuffled=\['fold0'\].* or shuffled=\[\] where"),
        (
            {"train": [1], "a": [1], "values": [1]},
            r"\['train', 'a', 'values'\].*=\['train'\] where",
        ),
        ({"train": [1], "shuffled": True}, "`shuffled` is True"),
        ({"train": [1], "num_preprocessors": 0}, "`num_preprocessors` is 0"),
        ({"train": [1], "num_preprocessors": 10**30}, "a whole number >= 1 and <= 10000"),
        ({"train": [1], "memory_bytes": 1.5}, "`memory_bytes` is 1.5"),
        ({"train": [1], "seed": "x"}, "`seed` is 'x'"),
        ({"train": [1], "on_error": ["skip"]}, "`on_error` is .*, but must be 'raise' or 'skip'"),
        ({"train": [1], "spill_dir": 3}, "`spill_dir` is 3, but must be the path of a folder"),
        ({"train": [1], "spill_dir": ""}, "`spill_dir` is '', but must be the path of a folder"),
        ({"train": [1], "spill_dir": "a\0"}, "must be the path of a folder.*null"),
        ({"train": [1], "shuffle": True}, "`shuffle` is no option.*: `shuffled` takes the names"),
        ({"train": [1], "shuffle": ["train"]}, "`shuffle` is no option.*: `shuffled` takes the n"),
        ({"train": [1], "spil_dir": "/tmp"}, "`spil_dir` is no option.*did you mean `spill_dir`"),
        ({"train": [1], "memory_byte": 3}, "`memory_byte` is no .*did you mean `memory_bytes`"),
        ({"train": [1], "prepair": {"train": len}}, "`prepair` is no .*did you mean `prepare`"),
        ({"train": [1], "colate": len}, "`colate` is no option"),
        (
            {"train": [1], "batch_size": 32},
            r"given to trial.batches\(name, batch_size=...\)",
        ),
        ({"train": [1], "drop_last": True}, r"given to trial.batches\(name, drop_last=True\)"),
        ({"train": [1], "num_workers": 4}, "`num_workers` is no option.*`num_preprocessors` is"),
        (
            {"train": [1], "batch_sampler": BatchSampler([1], 1, False)},
            "`batch_sampler` is no option.*single indices",
        ),
        ({"train": [1], "worker_init_fn": print}, "`worker_init_fn` is no .*__setstate__.*each"),
        ({"train": [1], "val": None}, "Data set 'val' is None, but must be a map"),
        ({"train": [1], "rate": 3}, "`rate` is no option.*and 3 is none"),
        ({"train": "folder"}, "Data set 'train' is 'folder', but must be"),
        ({"train": {"a": 1}}, "'train' is of type dict"),
        (
            {"train": DataLoader([1])},
            r"is a DataLoader, .*SharedPipeline.from_dataloader\(train=loader\)",
        ),
        ({"train": [1], "weights": [1.0]}, "`weights` is no option.*WeightedRandomSampler"),
    ],
)
def test_arguments_that_can_not_work(arguments, message):
    with pytest.raises(FleetConfigError, match=message):
        SharedPipeline(**arguments)


def test_data_sets_must_have_names():
    with pytest.raises(FleetConfigError, match=r"by name: .*1 without a name"):
        SharedPipeline([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "test"}, "no data set 'test'.*'train', 'val'"),
        ({"name": 3}, "`name` is 3, but must be the name of a data set"),
        ({"name": torch.ones(2)}, "must be the name of a data set"),
        ({"drop_last": "no"}, "`drop_last` is 'no', but must be True or False"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"batch_size": 2.0}, "`batch_size` is 2.0"),
        ({"batch_size": True}, "`batch_size` is True"),
        ({"epoch": -1}, "`epoch` is -1"),
        ({"rank": 2, "world_size": 2}, "`rank` is 2"),
        ({"name": "val", "batch_size": 21, "drop_last": True}, "20 samples gives no batch at all"),
    ],
)
def test_reads_that_can_not_work(agent, client, arguments, message):
    with pytest.raises(FleetConfigError, match=message):
        client.read(**{"name": "train", "epoch": 0, "batch_size": 4, **arguments})


@pytest.fixture(scope="module")
def client(agent) -> PipelineClient:
    return agent.client()


def test_drop_last_and_first_step_leave_out_batches(client):
    everything = [b.data[1].tolist() for b in client.read("train", epoch=0, batch_size=40)]
    assert [len(batch) for batch in everything] == [40, 40, 40, 30]
    full = client.read("train", epoch=0, batch_size=40, drop_last=True)
    assert [b.data[1].tolist() for b in full] == everything[:3]
    rest = client.read("train", epoch=0, batch_size=40, first_step=2)
    assert [b.data[1].tolist() for b in rest] == everything[2:]
    assert not list(client.read("train", epoch=0, batch_size=40, first_step=4))


def test_collate_fn_and_ragged_samples():
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
        with pytest.raises(
            RuntimeError, match=r"equal size.*give SharedPipeline\(collate_fn=\.\.\.\)"
        ):
            next(iter(client.read("plain", epoch=0, batch_size=2)))


def test_agent_gone():
    agent = Agent(SharedPipeline(train=Counted(4)))
    client = agent.client()
    iterator = iter(client.read("train", epoch=0, batch_size=2))
    next(iterator)
    with agent.killed():
        with pytest.raises(FleetError, match="agent of this node"):
            list(client.read("train", epoch=0, batch_size=2))
        iterator.close()  # nobody to tell, and no reason to raise


def test_shards_cover_the_batch():
    for size in range(12):
        for world_size in range(1, 6):
            shards = [shard(size, rank, world_size) for rank in range(world_size)]
            assert [i for start, stop in shards for i in range(start, stop)] == list(range(size))
            lengths = [stop - start for start, stop in shards]
            assert lengths == sorted(lengths, reverse=True)
            assert max(lengths) - min(lengths) <= 1
