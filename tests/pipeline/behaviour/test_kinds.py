"""Kinds of samples and of data sets that are unusual: as a DataLoader has them, or named."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pytest
import torch
from pipeline_harness import serving
from torch.utils.data import DataLoader

from optuna_fleet import FleetConfigError, PreprocessingError, SharedPipeline

Make = Callable[[int], Any]

KINDS: dict[str, Make] = {
    "requires grad": lambda i: torch.ones(3, requires_grad=True) * i,
    "a parameter": lambda i: (torch.nn.Parameter(torch.full((3000,), float(i))), i),
    "some require grad": lambda i: torch.ones(3, requires_grad=i == 6),
    "was reversed": lambda i: np.arange(5)[::-1] + i,
    "lists": lambda i: [[i], (i, 2.5)],
}

REFUSED: dict[str, Make] = {
    "reversed": lambda i: np.arange(9000)[::-1],
    "some are reversed": lambda i: np.arange(9000)[:: -1 if i == 6 else 1],
    **{
        f"an image of mode {mode}": lambda i, mode=mode: (PIL.Image.new(mode, (4, 3)), i)  # type: ignore[misc]
        for mode in ("RGB", "1", "P", "F")
    },
}


class Samples:
    def __init__(self, make: Make) -> None:
        self.make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def looks(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value), [looks(each) for each in value]
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_batches_look_as_those_of_a_loader(kind: str) -> None:
    dataset = Samples(KINDS[kind])
    wanted = [looks(batch) for batch in DataLoader(dataset, batch_size=4)]  # type: ignore[arg-type]
    with serving(SharedPipeline(val=dataset)) as agent:
        batches = agent.client().read("val", epoch=0, batch_size=4)
        assert [looks(batch.data) for batch in batches] == wanted
    inline = SharedPipeline(val=dataset).inline().read("val", epoch=0, batch_size=4)
    assert [looks(batch.data) for batch in inline] == wanted


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_loader_refuses_is_refused_with_its_words(kind: str) -> None:
    dataset = Samples(REFUSED[kind])
    with pytest.raises((TypeError, ValueError)) as theirs:
        list(DataLoader(dataset, batch_size=4))  # type: ignore[arg-type]
    words = str(theirs.value)[:60]
    ours: Any = pytest.raises((TypeError, PreprocessingError), match=re.escape(words))
    with serving(SharedPipeline(val=dataset)) as agent, ours:
        list(agent.client().read("val", epoch=0, batch_size=4))
    with pytest.raises(type(theirs.value), match=re.escape(words)):
        list(SharedPipeline(val=dataset).inline().read("val", epoch=0, batch_size=4))


def test_images_go_to_a_collate_fn_as_they_are() -> None:
    dataset = Samples(REFUSED["an image of mode P"])
    with serving(SharedPipeline(val=dataset, collate_fn=list)) as agent:
        (batch,) = agent.client().read("val", epoch=0, batch_size=10)
    assert [image.mode for image, _ in batch.data] == ["P"] * 10


def test_a_managers_list_is_read_and_named_when_it_is_gone() -> None:
    with multiprocessing.Manager() as manager:
        pipeline = SharedPipeline(val=manager.list(range(300)))
        with serving(pipeline, chunk_bytes=100, num_preprocessors=1) as agent:
            batches = iter(agent.client().read("val", epoch=0, batch_size=8))
            assert next(batches).data.tolist() == [*range(8)]
            manager.shutdown()
            with pytest.raises(PreprocessingError, match=r"multiprocessing\.Manager.*as a list"):
                list(batches)


def test_opened_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["images"] = np.arange(10)
        with pytest.raises(FleetConfigError, match=r"'val' is of type File, but .* map-style"):
            SharedPipeline(val=file)
        for dataset in (file["images"], Samples(file["images"].__getitem__)):
            with pytest.raises(FleetConfigError, match=r"h5py.*in the __getitem__ .*__getstate__"):
                SharedPipeline(val=dataset).packed()
    error = pytest.raises(FleetConfigError, match="'val' is of type TextIOWrapper, but")
    with open(tmp_path / "text", "w") as text, error:
        SharedPipeline(val=text)
