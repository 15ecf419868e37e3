"""By way of processes and the arena every batch is, bit for bit, what one process alone makes."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_harness import serving
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline


class Samples:
    """Samples of one kind or another, with something random in them."""

    def __init__(self, kind: str, length: int) -> None:
        self.kind = kind
        self.length = length
        self.transform = v2.Compose([v2.CenterCrop(14), v2.RandomCrop(9), v2.RandomVerticalFlip()])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        match self.kind:
            case "dense":
                return {"x": torch.rand(3, 60) + index, "text": f"{index}", "n": (index, 0.5)}
            case "large":
                return np.random.randint(0, 255, (90, 90, 3), dtype=np.uint8), index
            case "ragged":
                return torch.arange(1 + index % 9 + 2000 * (index % 13 == 5)), {index}
            case "mixed":
                return (torch.rand(4), index) if index % 7 else (torch.rand(4), float(index))
            case _:
                image = torch.full((3, 16, 20), index % 251, dtype=torch.uint8)
                image[:, :8] += torch.arange(20, dtype=torch.uint8)
                return self.transform(image), index


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, bits(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(each) for each in value]
    return value


@pytest.mark.parametrize("seed", range(5))
def test_any_configuration(seed, tmp_path):
    chance = random.Random(seed)
    kind = ("dense", "large", "ragged", "mixed", "images")[seed % 5]
    collate = list if kind == "ragged" else None
    spilled = {"spill_dir": tmp_path} if seed % 3 == 0 else {}
    length = chance.choice([1, 40, 170])
    data = {"train": Samples(kind, length), "val": Samples("dense", 9)}
    pipeline = SharedPipeline(seed=seed, collate_fn=collate, **spilled, **data)
    alone = pipeline.inline()
    budgets = {"memory_bytes": chance.choice([1 << 18, 1 << 24]), "chunk_bytes": 9000}
    with serving(pipeline, num_preprocessors=chance.randint(1, 3), **budgets) as agent:
        clients = [agent.client() for _ in range(2)]
        for epoch in range(3):
            plans = [
                {"batch_size": chance.choice([1, 7, 64]), "world_size": world, "rank": world - 1}
                for world in (1, chance.randint(1, 2))
            ]
            kept = []
            for client, plan in zip(clients, plans, strict=True):
                read = client.read("train", epoch=epoch, continues=True, dummy=True, **plan)
                for ours, theirs in zip(
                    read, alone.read("train", epoch=epoch, dummy=True, **plan), strict=True
                ):
                    kept.append((ours.data, bits(theirs.data)))
                    assert bits(ours.data) == bits(theirs.data)
                if epoch == 1 and (pids := agent.pids()):
                    os.kill(pid := chance.choice(pids), signal.SIGKILL)
                    while pid in agent.pids():
                        pass  # each question is answered after what the agent has heard so far
            assert all(bits(data) == wanted for data, wanted in kept[-40:])
        assert agent.stats().peak_bytes <= budgets["memory_bytes"]
