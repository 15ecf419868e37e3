"""The memory that preprocessors write and readers map, whatever the kernel lacks."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import pytest
import torch
from pipeline_harness import Forked, serving

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.chunks import arena as arenas
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.reader import mapping as mappings


class Pictures:
    """Sample i is 150 kB of i, and i."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((150_000,), index, dtype=torch.uint8), index


def refused(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


LACKS: dict[str, tuple[Any, str, Any]] = {
    "huge pages": (arenas, "_MADV_COLLAPSE", 12345),
    "counts of page faults": (mappings, "_num_faults", lambda: 0),
    "scans of pages": (mappings, "_PAGEMAP_SCAN", 0),
    "pages made ahead": (mappings, "_MADV_POPULATE_WRITE", 12345),
    "addresses": (mappings, "map_aligned", refused),
}


@pytest.mark.parametrize("lacks", [None, "memory", *LACKS])
def test_batches_are_private_and_stay_whatever_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, lacks: str | None
) -> None:
    """Some are written to, some are kept, while their places are used again and again."""
    if lacks in LACKS:
        monkeypatch.setattr(*LACKS[lacks])
    folder = str(tmp_path) if lacks == "memory" else None
    pipeline = SharedPipeline(train=Pictures())
    inline, kept = pipeline.inline(), list[Any]()
    options = {"memory_bytes": 6 << 20, "chunk_bytes": 1 << 20}
    with serving(pipeline, spill_dir=folder, **options) as agent:
        mine, theirs = agent.client(), agent.client()
        for epoch in range(3):
            clients = (mine, mine, theirs, inline)
            readers = [client.read("train", epoch=epoch, batch_size=4) for client in clients]
            for step, (one, again, other, wanted) in enumerate(zip(*readers, strict=True)):
                assert torch.equal(one.data[0], wanted.data[0])
                if step % 4:
                    one.data[0][::2].zero_()
                else:
                    kept = [*kept, (one.data[0], wanted.data[0])][-3:]
                assert torch.equal(again.data[0], wanted.data[0])
                assert torch.equal(other.data[0], wanted.data[0])
                assert all(torch.equal(a, b) for a, b in kept)
        assert agent.stats().peak_bytes <= 6 << 20
        assert os.listdir(tmp_path) == []


def test_a_fork_keeps_what_it_has() -> None:
    told, tell = os.pipe()
    with serving(SharedPipeline(val=Pictures()), memory_bytes=3 << 20, chunk_bytes=1) as agent:
        client = agent.client()
        held = [next(iter(client.read("val", epoch=0, batch_size=4)))]

        def look() -> bool:
            os.read(told, 1)  # by then its place was used again
            return all((row == index).all() for row, index in zip(*held[0].data, strict=True))

        fork = Forked(look)
        held.clear()
        assert sum(batch.local_size for batch in client.read("val", epoch=0, batch_size=4)) == 60
        os.write(tell, b"x")
        assert fork.result()
    os.close(told)
    os.close(tell)


def test_nobody_else_can_write() -> None:
    arena = Arena(4 * mmap.PAGESIZE)
    arena.writable(0, 4)[:] = b"mine"
    with pytest.raises(OSError, match="descriptor"):
        os.pwrite(arena.descriptor, b"yours", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.descriptor, mmap.PAGESIZE)
    with pytest.raises(PermissionError):  # nor by the descriptor opened anew: it is sealed
        os.pwrite(os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR), b"yours", 0)
    with pytest.raises(TypeError):
        arena.readable(0, 4)[0] = 1
