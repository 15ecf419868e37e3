"""How much memory there is by default, and that no more of it is taken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import serving

from optuna_fleet import SharedPipeline

# -- what is really taken ------------------------------------------------------------------------

MIB = 1 << 20


class Pictures:
    """Sample i is 150 kB of i, and i."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((150_000,), index % 251, dtype=torch.uint8), index


def flipped(sample: Any) -> Any:
    picture, index = sample
    return (picture.flip(0) if torch.rand(()) < 0.5 else picture), index


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    children: list[str] = []
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            children += thread.read_text().split()
    for child in children:
        yield from tree(int(child))


def memory_files() -> dict[int, int]:
    """Bytes that the kernel keeps of each arena, by the file's number."""
    found = {}
    for pid in tree(os.getpid()):
        for folder in ("fd", "map_files"):
            with contextlib.suppress(OSError):  # it has just ended
                for entry in Path(f"/proc/{pid}/{folder}").iterdir():
                    with contextlib.suppress(OSError):  # closed in the meantime
                        if "memfd:optuna-fleet-arena" in os.readlink(entry):
                            status = entry.stat()
                            found[status.st_ino] = status.st_blocks * 512
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what files others have mapped")
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_budget_is_kept_in_real_memory(is_kept: bool) -> None:
    budget = 32 * MIB
    pipeline = SharedPipeline(train=Pictures(), augment=flipped if is_kept else None)
    not_ours = memory_files().keys()
    taken: list[int] = []
    with serving(pipeline, memory_bytes=budget, num_preprocessors=2) as agent:
        readers = [agent.client().read("train", epoch=e, batch_size=32) for e in range(4)]
        held: list[Any] = [None] * len(readers)
        for held[:] in zip(
            *readers, strict=True
        ):  # four batches at once, until the next are there
            files = memory_files()
            taken.append(sum(files[number] for number in files.keys() - not_ours))
        assert agent.stats().num_dropped > 0
        assert (agent.stats().decoded_bytes > 0) == is_kept
    assert 0.6 * budget < max(taken) <= budget
