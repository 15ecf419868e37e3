"""Where preprocessed data is kept makes no difference to a trial (G2, G3)."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline, take_apart
from tests.behaviour.harness import Leg, fleet_of, train


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """8-bit pictures of a pixel's margin too much, cropped at random."""

    transform = v2.Compose(
        [
            v2.Pad(1),
            v2.RandomCrop(6),
            v2.ToDtype(torch.float64, scale=True),
            v2.Normalize([0.5], [0.2]),
        ]
    )

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randint(
            0, 256, (size, 1, 6, 6), generator=generator, dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), index % 3


def outcome(summary: list[Any], *, whole: bool = False, **options: Any) -> list[Any]:
    """Losses of a trial that stays, of one that moves, and of one that grows."""
    train_set, augment, finish = Pictures(41), None, None
    if not whole:
        train_set, augment, finish = take_apart(train_set, augment=1, finish=2)
    stages = {"augment": {"train": augment}, "finish": {"train": finish}} if augment else {}
    pipeline = SharedPipeline(train=train_set, val=Pictures(20), **stages, **options)
    study = optuna.create_study()
    with fleet_of(devices=3, pipeline=pipeline) as fleet:
        fleet.script = {
            0: [Leg((0,))],
            1: [Leg((1,), 2), Leg((2,))],
            2: [Leg((2,), 1), Leg((1, 2))],
        }
        study.optimize(train, n_trials=3, executor=fleet)
        summary.append(fleet.summary)
    return [trial.user_attrs["losses"] for trial in study.trials]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    return outcome([], whole=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_bytes": 12_000, "whole": True},
        {"memory_bytes": 40_000, "spill_dir": "here"},
    ],
    ids=["decoded", "ring", "disk"],
)
def test_every_tier_gives_the_same_losses(
    options: dict[str, Any], wanted: list[Any], tmp_path: Any
) -> None:
    if "spill_dir" in options:
        options = {**options, "spill_dir": tmp_path}
    assert outcome([], **options) == wanted
    assert list(tmp_path.iterdir()) == []
