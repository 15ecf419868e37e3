"""Transforms of data sets, taken apart where the user says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms as v1
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from optuna_fleet import FleetConfigError, SharedPipeline, take_apart

STEPS = {
    "v1": [v1.Resize(20), v1.RandomCrop(16), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)],
    "v2": [
        v2.PILToTensor(),
        v2.RandomCrop(16),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.2] * 3),
    ],
}


def composed(version: str) -> Any:
    return (v1 if version == "v1" else v2).Compose(STEPS[version])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        path = tmp_path / f"class{number % 2}"
        path.mkdir(exist_ok=True)
        Image.effect_noise((30, 24), 50).convert("RGB").save(path / f"{number}.png")
    return tmp_path


def read(batches: Any) -> list[torch.Tensor]:
    return [leaf for batch in batches for leaf in batch.data]


@pytest.mark.parametrize("kind", ["folder", "joint", "subset"])
@pytest.mark.parametrize(("version", "end"), [("v1", None), ("v1", 3), ("v2", 2), ("v2", 4)])
def test_parts_together_give_what_the_whole_gives(
    folder: Path, version: str, kind: str, end: int | None
) -> None:
    whole: Any = ImageFolder(str(folder), composed(version))
    if kind == "joint":
        whole = FakeData(6, (3, 30, 24), transform=composed(version))
    dataset, augment, finish = take_apart(whole, augment=1, finish=end)
    if kind == "subset":
        whole, dataset = (Subset(each, [4, 2, 0, 1]) for each in (whole, dataset))
    stages = {"augment": augment} | ({} if finish is None else {"finish": finish})
    ours = SharedPipeline(train=dataset, **stages).inline()
    theirs = SharedPipeline(train=whole).inline()
    for epoch in range(2):
        found, wanted = (
            read(each.read("train", epoch=epoch, batch_size=4)) for each in (ours, theirs)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (finish is None) == (end in (None, 4))


def test_the_data_set_that_was_given_stays_as_it_is(folder: Path) -> None:
    dataset = ImageFolder(str(folder), composed("v2"))
    parts = take_apart(dataset, augment=0)
    assert parts.dataset[0][0].size == (30, 24)
    assert dataset[0][0].shape == (3, 16, 16)
    assert take_apart(dataset, augment=4)[1:] == (None, None)


@pytest.mark.parametrize(
    ("transform", "given", "words"),
    [
        (None, {"augment": 0}, "needs a data set whose `transform` is a Compose, but .* is None"),
        (composed("v2"), {"augment": 5}, "`augment` is 5, but must be .*4"),
        (composed("v2"), {"augment": 2, "finish": 1}, "`finish` is 1, but must be .*2"),
    ],
)
def test_what_can_not_be_taken_apart(
    folder: Path, transform: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(FleetConfigError, match=words):
        take_apart(ImageFolder(str(folder), transform), **given)
