"""On GPUs each rank draws masks of its own; CPUs keep the trial's generator, alike on all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optuna_fleet.trainer.data import shard_loader
from optuna_fleet.trainer.data.shard_loader import ShardLoader
from optuna_fleet.trainer.run_parts import EpochPosition


@pytest.mark.parametrize(
    ("device", "world_size", "places"),
    [
        ("cuda", 2, [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]),
        ("cuda", 1, []),
        ("cpu", 2, []),
    ],
)
def test_each_rank_draws_masks_of_its_own_in_each_epoch(
    monkeypatch: pytest.MonkeyPatch, device: str, world_size: int, places: Any
) -> None:
    seeded: list[Any] = []
    monkeypatch.setattr(shard_loader, "seed_gpu", lambda *given: seeded.append(given[-1]))
    for rank in range(world_size):
        loader = ShardLoader.__new__(ShardLoader)
        position = EpochPosition(loop=1)
        run = SimpleNamespace(rank=rank, world_size=world_size, seed=0, number=0)
        for name, value in {
            "_position": position,
            "_run": run,
            "_device": torch.device(device),
            "_seeded_for": None,
            "_gives_whole_batches": False,
        }.items():
            setattr(loader, name, value)
        for epoch in (0, 0, 1):  # once in each, whatever is drawn in it
            position.epoch = epoch
            loader._begin_step()
    assert sorted(seeded) == places
