"""Rows of tensors are read by the block; nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_harness import serving
from torch.utils.data import Dataset, Subset, TensorDataset

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import PreprocessingError

N = 150
NUMBERS = torch.arange(float(N))

TENSORS = {
    "table": (NUMBERS[:, None] + torch.arange(4), NUMBERS.long()),
    "kinds": tuple(NUMBERS.to(d) for d in (torch.bool, torch.bfloat16, torch.uint8, torch.cfloat)),
    "strided": (NUMBERS[:, None, None].expand(N, 2, 3), torch.rand(3, N, 2).transpose(0, 1)),
    "empty": (torch.zeros(N, 0), NUMBERS),
    "large": (NUMBERS[:, None].expand(N, 5000).contiguous(),),
    "conjugate": (torch.complex(NUMBERS, -NUMBERS).conj(),),
    "gradients": (NUMBERS.clone().requires_grad_(),),
    "sparse": (torch.eye(N).to_sparse(), NUMBERS),
    "subclass": (torch.nn.Parameter(NUMBERS.clone()),),
}


class Texts(Dataset[Any]):
    """Few numbers, and a text that takes more than they do."""

    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.arange(16) + index, "text": f"{index} " + "x" * 4000}

    def __getitems__(self, wanted: list[int]) -> list[Any]:
        return [self[index] for index in wanted]


def test_texts_count_where_chunks_are_cut() -> None:
    with serving(SharedPipeline(val=Texts(), batched=True), memory_bytes=4 << 20) as agent:
        batch = next(iter(agent.client().read("val", epoch=0, batch_size=4)))
    assert batch.data["ids"][:, 0].tolist() == [0, 1, 2, 3]
    assert [text.split()[0] for text in batch.data["text"]] == ["0", "1", "2", "3"]


def read(client: Any, epoch: int, batch_size: int, name: str = "train") -> list[Any]:
    batches = client.read(name, epoch=epoch, batch_size=batch_size)
    return [list(batch.data) for batch in batches]


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.dtype, a.shape, a.is_conj()) == (b.dtype, b.shape, b.is_conj())
            assert torch.equal(a.to_dense(), b.to_dense())


def collate_sparse(samples: list[Any]) -> list[Any]:
    return [torch.stack([each[i].to_dense() for each in samples]) for i in range(2)]


def test_rows_are_those_that_are_read_one_by_one() -> None:
    data: dict[str, Any] = {}
    for kind, tensors in TENSORS.items():
        data[f"train_{kind}"] = whole = TensorDataset(*tensors)
        for number, part in enumerate([range(N - 1, 9, -2), [7, 7, 140, 3]]):
            data[f"train_{kind}_{number}"] = Subset(Subset(whole, range(N)), part)
    samples = {name: [each[index] for index in range(len(each))] for name, each in data.items()}
    options: Any = {"collate_fn": {name: collate_sparse for name in data if "sparse" in name}}
    pipeline = SharedPipeline(**data, seed=2, **options)
    inline, alone = pipeline.inline(), SharedPipeline(**samples, seed=2, **options).inline()
    with serving(pipeline, chunk_bytes=3000) as agent:
        client = agent.client()
        for name in data:
            for epoch, batch_size in ((0, 7), (1, 64), (0, 32)):
                wanted = read(inline, epoch, batch_size, name)
                assert_same(read(client, epoch, batch_size, name), wanted)
                assert_same(wanted, read(alone, epoch, batch_size, name))
        assert agent.notices() == []


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [3, 3, 0, *range(60), 149]},
        {"collate_fn": lambda samples: [torch.stack([row for row, _ in samples]) * 2]},
        {"augment": lambda sample: (sample[0] + torch.rand(4), sample[1])},
        {"finish": lambda sample: [sample[0] / 2, sample[1]]},
        {"on_error": "skip"},
    ],
)
def test_options_hold_for_rows_too(options: dict[str, Any]) -> None:
    pipeline = SharedPipeline(train=TensorDataset(*TENSORS["table"]), **options)
    inline = pipeline.inline()
    with serving(pipeline, chunk_bytes=1000) as agent:
        for epoch in range(2):
            assert_same(read(agent.client(), epoch, 16), read(inline, epoch, 16))


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * each for each in super().__getitem__(index))


def test_a_subclass_may_do_what_it_likes() -> None:
    pipeline = SharedPipeline(train=Doubled(NUMBERS))
    with serving(pipeline) as agent:
        found = torch.cat([batch[0] for batch in read(agent.client(), 0, 50)])
    assert sorted(found.tolist()) == (2 * NUMBERS).tolist()


def test_an_index_that_there_is_not_is_told_as_ever() -> None:
    dataset = Subset(TensorDataset(NUMBERS), [0, 1, N])
    with (
        serving(SharedPipeline(val=dataset)) as agent,
        pytest.raises(PreprocessingError, match="Sample 2 of data set 'val' raised IndexError"),
    ):
        list(agent.client().read("val", epoch=0, batch_size=3))
