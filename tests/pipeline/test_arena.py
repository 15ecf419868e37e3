"""The arena: what preprocessors write in place, and what becomes of it where it is read."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_harness import Forked

from optuna_fleet.pipeline.chunks import arena as arenas
from optuna_fleet.pipeline.chunks.arena import HUGE_PAGE, Arena
from optuna_fleet.pipeline.reader import mapping as mappings
from optuna_fleet.pipeline.reader.mapping import Mapping

PAGE = mmap.PAGESIZE
SIZE = 2 * HUGE_PAGE + 40 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = Arena(SIZE)
    yield found
    gc.collect()


def mapped(arena: Arena) -> Mapping:
    return Mapping(arena.nbytes, os.dup(arena.descriptor))


def write(arena: Arena, address: int, content: Any) -> None:
    room = arena.writable(address, len(content))
    room[:] = bytes(content)


def lent(mapping: Mapping, address: int, nbytes: int) -> Any:
    piece = mapping.lend(address, nbytes)
    assert piece is not None
    return piece


@pytest.mark.parametrize("has_huge_pages", [True, False])
@pytest.mark.parametrize("begin", [0, 3 * PAGE, HUGE_PAGE - PAGE])
def test_what_is_written_in_place_is_read(arena, monkeypatch, has_huge_pages, begin) -> None:
    monkeypatch.setattr(arenas, "_MADV_COLLAPSE", 25 if has_huge_pages else 12345)
    content = os.urandom(HUGE_PAGE + 9 * PAGE)
    write(arena, begin, content)
    assert lent(mapped(arena), begin, len(content)).tobytes() == content
    assert bytes(arena.readable(begin, len(content))) == content


def test_a_file_in_a_folder_is_no_other_and_leaves_nothing(tmp_path) -> None:
    arena = Arena(SIZE, str(tmp_path))
    assert os.fstat(arena.descriptor).st_blocks * 512 >= SIZE  # it has all its room at once
    write(arena, 3 * PAGE, b"there" * 999)
    mapping = mapped(arena)
    assert lent(mapping, 3 * PAGE, 4995).tobytes() == b"there" * 999
    assert mapping.copy(3 * PAGE, 4995).tobytes() == b"there" * 999
    assert os.listdir(tmp_path) == []


def test_nobody_else_can_write(arena) -> None:
    write(arena, 0, b"mine")
    with pytest.raises(OSError, match="descriptor"):
        os.pwrite(arena.descriptor, b"yours", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.descriptor, PAGE)
    with pytest.raises(PermissionError):  # nor by the descriptor opened anew: it is sealed
        os.pwrite(os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR), b"yours", 0)
    with pytest.raises(TypeError):
        arena.readable(0, PAGE)[0] = 1


@pytest.mark.parametrize("counts_faults", [True, False])
def test_what_a_reader_writes_is_its_own_and_gone_when_the_place_is_written_anew(
    arena, monkeypatch, counts_faults
) -> None:
    if not counts_faults:
        monkeypatch.setattr(mappings, "_num_faults", lambda: 0)
    write(arena, 0, b"a" * (3 * PAGE))
    one, other = mapped(arena), mapped(arena)
    piece, theirs = lent(one, 0, 3 * PAGE), lent(other, 0, 3 * PAGE)
    piece[PAGE : PAGE + 5] = 0
    assert theirs.tobytes() == b"a" * (3 * PAGE)
    del piece
    one.clean(0, 3 * PAGE)
    write(arena, 0, b"b" * (3 * PAGE))
    assert lent(one, 0, 3 * PAGE).tobytes() == b"b" * (3 * PAGE)


@pytest.mark.parametrize("can_scan", [True, False])
def test_many_pages_written_here_and_there_are_all_thrown_away(
    arena, monkeypatch, can_scan
) -> None:
    monkeypatch.setattr(mappings, "_PAGEMAP_SCAN", mappings._PAGEMAP_SCAN if can_scan else 0)
    nbytes = HUGE_PAGE + 200 * PAGE
    write(arena, 0, b"a" * nbytes)
    mapping = mapped(arena)
    piece = lent(mapping, 0, nbytes)
    piece[:: 2 * PAGE] = 0
    del piece
    mapping.clean(0, nbytes)
    assert lent(mapping, 0, nbytes).tobytes() == b"a" * nbytes


@pytest.mark.parametrize("can_populate", [True, False])
def test_a_view_that_is_kept_stays_as_it_is(arena, monkeypatch, can_populate) -> None:
    if not can_populate:
        monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 12345)
    write(arena, 0, b"a" * (4 * PAGE))
    mapping = mapped(arena)
    piece = lent(mapping, 0, 4 * PAGE)
    kept = torch.frombuffer(piece, dtype=torch.uint8)[PAGE : 2 * PAGE]
    mapping.keep(0, piece)
    del piece
    write(arena, 0, b"b" * (4 * PAGE))
    assert (kept == ord("a")).all()
    # Its addresses are taken: what comes to lie there is read from elsewhere.
    assert mapping.lend(3 * PAGE, 2 * PAGE) is None
    assert mapping.copy(0, 4 * PAGE).tobytes() == b"b" * (4 * PAGE)
    assert mapping.lend(4 * PAGE, PAGE) is not None
    del kept
    assert lent(mapping, 0, 4 * PAGE).tobytes() == b"b" * (4 * PAGE)


def test_two_readings_of_the_same_do_not_see_what_the_other_writes(arena) -> None:
    write(arena, 0, b"a" * PAGE)
    mapping = mapped(arena)
    piece = lent(mapping, 0, PAGE)
    assert mapping.lend(0, PAGE) is None
    del piece
    assert mapping.lend(0, PAGE) is not None


def test_a_fork_keeps_what_it_has(arena) -> None:
    write(arena, 0, b"a" * (4 * PAGE))
    mapping = mapped(arena)
    pieces = [lent(mapping, 0, 4 * PAGE)]
    told, tell = os.pipe()

    def read() -> bytes:
        os.read(told, 1)  # by then the place was written anew
        return bytes(pieces[0].tobytes())

    fork = Forked(read)
    pieces.clear()
    mapping.clean(0, 4 * PAGE)
    write(arena, 0, b"b" * (4 * PAGE))
    assert lent(mapping, 0, 4 * PAGE).tobytes() == b"b" * (4 * PAGE)
    os.write(tell, b"x")
    assert fork.result() == b"a" * (4 * PAGE)
    os.close(told)
    os.close(tell)


def test_where_it_can_not_be_mapped_everything_is_copied(arena, monkeypatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    write(arena, PAGE, b"a" * PAGE)
    monkeypatch.setattr(mappings, "map_aligned", refused)
    mapping = mapped(arena)
    assert mapping.lend(PAGE, PAGE) is None
    assert mapping.copy(PAGE, PAGE).tobytes() == b"a" * PAGE


def test_a_mapping_goes_with_its_last_view(arena) -> None:
    def count() -> int:
        gc.collect()
        with open("/proc/self/maps") as lines:
            return sum("optuna-fleet-arena" in line for line in lines)

    before = count()
    mapping = mapped(arena)
    piece = lent(mapping, 0, PAGE)
    mapping.close()
    del mapping
    assert count() == before + 1
    assert np.array_equal(piece, np.zeros(PAGE))
    del piece
    assert count() == before
