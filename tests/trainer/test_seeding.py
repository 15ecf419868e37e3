"""Masks are drawn apart on each rank of GPUs; all other randomness is alike on the ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.trainer.data import shard_loader
from optuna_fleet.trainer.data.reading import EpochPosition
from optuna_fleet.trainer.data.shard_loader import ShardLoader
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.moves.stop_line import StopLine
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.moves.within_epoch import WithinEpoch
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.widths import Widths
from optuna_fleet.wire.messages import Progress
from tests.fleets import small_pipeline

GPU = torch.device("cuda", 0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that the GPU's generator got."""
    seeds: list[int] = []
    batch = Batch(data=None, local_size=1, global_size=2)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    fed = [(batch, None)] * 3
    monkeypatch.setattr(shard_loader, "feed", lambda *_: (one for one in fed))
    return seeds


@pytest.fixture
def client() -> Iterator[PipelineClient]:
    here, there = socket.socketpair()
    with here, there:
        yield PipelineClient(here, small_pipeline().spec())


def loader_of(
    client: Any, device: torch.device, world_size: int, rank: int
) -> tuple[ShardLoader, EpochPosition]:
    run = SimpleNamespace(
        measure=False, world_size=world_size, rank=rank, seed=1, number=2, run_id=3
    )
    session: Any = SimpleNamespace(
        run=run,
        send=lambda _: None,
        begin_batch=lambda: None,
        began=0.0,
        check=lambda: None,
        check_unwinding=lambda: None,
        remark=lambda *_: None,
        stop_line=StopLine(),
        progress=Progress(),
    )
    position = EpochPosition(loop=1, is_inside=True)
    prepared: Any = SimpleNamespace(modules=[torch.nn.Identity()], traits=lambda _: {"any"})
    weights = Weights()
    none: Any = None
    parts = Parts(
        session=session,
        device=device,
        position=position,
        widths=Widths(session),
        weights=weights,
        reducer=SimpleNamespace(num_passes=0),  # type: ignore[arg-type]
        net=SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
        totals=Totals(weights, device, lambda own: [own]),
    )
    within = WithinEpoch(parts, none, none)
    loader = ShardLoader(parts, client, prepared, within)
    return loader, position


def epochs(client: Any, device: torch.device, world_size: int, rank: int, *which: int) -> None:
    loader, position = loader_of(client, device, world_size, rank)
    for position.epoch in which:
        for name in ("train", "val", "train"):
            assert len(list(loader.batches(name, 2, drop_last=False))) == 3


def test_each_rank_draws_masks_of_its_own_in_each_epoch(client: Any, drawn: list[int]) -> None:
    for rank in range(3):
        epochs(client, GPU, 3, rank, 0, 1)
    assert len(set(drawn)) == len(drawn) == 6
    resumed = drawn[3:4]
    drawn.clear()
    epochs(client, GPU, 3, 1, 1)
    assert drawn == resumed


@pytest.mark.parametrize(("device", "world_size"), [(GPU, 1), (torch.device("cpu"), 2)])
def test_one_device_and_cpus_go_on_with_the_trials_own_generator(
    client: Any, drawn: list[int], device: torch.device, world_size: int
) -> None:
    before = torch.get_rng_state()
    epochs(client, device, world_size, 0, 0, 1)
    assert drawn == []
    assert torch.equal(torch.get_rng_state(), before)


def test_what_reads_before_anything_was_prepared_stays_on_one_device(
    client: Any, drawn: list[int]
) -> None:
    loader, _ = loader_of(client, torch.device("cpu"), 1, 0)
    loader._modules.clear()
    list(loader.batches("train", 2, drop_last=False))
    assert loader._widths.bounds.max_devices == 1
