"""Kinds of samples and of data sets that are unusual: as a DataLoader has them, or named."""

from __future__ import annotations

import collections
import multiprocessing
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from pipeline_datasets import Made
from pipeline_harness import serving
from torch.utils.data import DataLoader
from torchvision import tv_tensors

from optuna_fleet import PreprocessingError, SharedPipeline

Make = Callable[[int], Any]
Point = collections.namedtuple("Point", "x y")


class Halved(collections.namedtuple("Halved", "x label")):
    """One that computes, when it is made of a batch too."""

    def __new__(cls, x: Any, label: Any) -> Halved:
        return super().__new__(cls, x / 2, label)


KINDS: dict[str, Make] = {
    "requires_grad": lambda i: torch.ones(3, requires_grad=True) * i,
    "parameter": lambda i: (torch.nn.Parameter(torch.full((3000,), float(i))), i),
    "some_require_grad": lambda i: torch.ones(3, requires_grad=i == 6),
    "was_reversed": lambda i: np.arange(5)[::-1] + i,
    "lists": lambda i: [[i], (i, 2.5), [i, f"{i}"]],
    "bfloat16": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "transposed": lambda i: torch.arange(6).view(2, 3).t() + i,
    "large": lambda i: (torch.arange(9000).view(9, 1000).t(), i + np.arange(9e3).reshape(9, -1).T),
    "large_conjugate": lambda i: torch.full((2000,), i * 1j).conj(),
    "empty_tensor": lambda i: (torch.empty(0, 3), i),
    "scalars": lambda i: (torch.tensor(i), np.array(i, dtype=np.float32), np.float32(i / 3), i),
    "numbers": lambda i: (i / 3, i % 2 == 0, np.int32(i)),
    "alike_and_others": lambda i: (float(i) if i > 6 else i, np.arange(3), ("x", b"y")),
    "strings_in_a_dict": lambda i: {"name": f"name {i}", "pair": (f"{i}", i)},
    "namedtuple": lambda i: Point(torch.full((2,), i), {"z": (i, f"{i}")}),
    "namedtuple_that_computes": lambda i: Halved(torch.full((2,), 8.0 * i), f"{i}"),
    "empty_tuple": lambda i: (),
    "ordered_dict": lambda i: collections.OrderedDict(a=i, b=f"{i}"),
    "tv_tensor": lambda i: (tv_tensors.Image(torch.full((1, 2, 2), i)), i),
    "order_of_keys": lambda i: {"a": i, "b": 1} if i % 2 else {"b": 1, "a": i},
    "long_texts": lambda i: f"{i}" * 20_000,
}

REFUSED: dict[str, Make] = {
    "reversed": lambda i: np.arange(9000)[::-1],
    "some_are_reversed": lambda i: np.arange(9000)[:: -1 if i == 6 else 1],
    "image": lambda i: (PIL.Image.new("P", (4, 3)), i),
}


def looks(value: Any) -> Any:
    """All that tells one batch from another."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj()
        return kind, value.dtype, value.shape, value.requires_grad, plain.tolist()
    if isinstance(value, dict):
        return kind, [(key, looks(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [looks(each) for each in value]
    return kind, pickle.dumps(value)


def pipeline_of(kinds: dict[str, Make], **options: Any) -> SharedPipeline:
    return SharedPipeline(
        **{name: Made(kinds[name], 10) for name in kinds}, shuffled=[], **options
    )


def read(client: Any, name: str) -> list[Any]:
    return [looks(batch.data) for batch in client.read(name, epoch=0, batch_size=4)]


def test_batches_look_as_those_of_a_loader() -> None:
    pipeline = pipeline_of(KINDS)
    inline = pipeline.inline()
    with serving(pipeline, chunk_bytes=200) as agent:
        client = agent.client()
        for name in KINDS:
            loader: Any = DataLoader(Made(KINDS[name], 10), batch_size=4)  # type: ignore[arg-type]
            wanted = [looks(batch) for batch in loader]
            assert read(client, name) == wanted, name
            assert read(inline, name) == wanted, name


def test_what_a_loader_refuses_is_refused_with_its_words() -> None:
    pipeline = pipeline_of(REFUSED)
    with serving(pipeline) as agent:
        client = agent.client()
        for name, make in REFUSED.items():
            with pytest.raises((TypeError, ValueError)) as theirs:
                list(DataLoader(Made(make, 10), batch_size=4))  # type: ignore[arg-type]
            words = re.escape(str(theirs.value)[:60])
            with pytest.raises((TypeError, PreprocessingError), match=words):
                read(client, name)
            with pytest.raises(type(theirs.value), match=words):
                read(pipeline.inline(), name)


def test_images_go_to_a_collate_fn_as_they_are() -> None:
    with serving(pipeline_of({"val": REFUSED["image"]}, collate_fn=list)) as agent:
        (batch,) = agent.client().read("val", epoch=0, batch_size=10)
    assert [image.mode for image, _ in batch.data] == ["P"] * 10


def test_a_managers_list_is_read() -> None:
    with (
        multiprocessing.Manager() as manager,
        serving(SharedPipeline(val=manager.list("abc"))) as agent,
    ):
        assert [b.data for b in agent.client().read("val", epoch=0, batch_size=3)] == [
            ["a", "b", "c"]
        ]
