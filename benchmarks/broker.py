"""What the broker of a node costs: messages and decisions, with nobody who makes or reads data.

python benchmarks/broker.py            # the server, with simulated preprocessors and readers
python benchmarks/broker.py --store    # its bookkeeping alone, a million chunks

Preprocessors answer at once and write nothing, readers ask for the next chunk as soon as they have
one. They are two processes, one for all of each kind: what is measured is the server's own CPU
time, and what it could serve if it had a core to itself.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from optuna_fleet.pipeline import PipelineServer, SharedPipeline, wire
from optuna_fleet.pipeline.chunks.arena import Extents
from optuna_fleet.pipeline.messages import (
    Advance,
    ChunkProduced,
    ChunkReady,
    ClosePass,
    MeasureSample,
    OpenPass,
    PassOpened,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.server.allocator import Space
from optuna_fleet.pipeline.server.store import ChunkStore
from optuna_fleet.pipeline.spec import ChunkKey

IMAGES = 16
SAMPLE_BYTES = 3 * 224 * 224 + 8
MEMORY_BYTES = 64 << 30  # addresses only: nothing is written


class Numbers:
    """A data set of which no sample is ever made."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def answer(order: object) -> object:
    """What a preprocessor says that needs no time."""
    if isinstance(order, MeasureSample):
        return SampleMeasured(key=order.key, sample_bytes=SAMPLE_BYTES, header_bytes=400)
    assert isinstance(order, ProduceChunk)
    return ChunkProduced(
        key=order.key,
        nbytes=order.max_bytes,
        num_samples=order.chunk_size,
        busy_s=1e-3,
    )


def preprocess(control: socket.socket) -> None:
    """Be all preprocessors: their sockets come by another one."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is control:
                    data, fds, _, _ = socket.recv_fds(control, 1, 1)
                    if not data:
                        return
                    selector.register(socket.socket(fileno=fds[0]), selectors.EVENT_READ)
                else:
                    wire.send(sock, answer(wire.receive(sock)))


def read(socks: list[socket.socket], num_chunks: int) -> None:
    """Be all readers, each of a whole pass."""
    for sock in socks:
        wire.receive(sock)  # of the arena, which nobody here maps
        wire.send(sock, OpenPass(pass_id=1, name="train", epoch=0, start=0, continues=False))
    left = len(socks)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ, _reading(sock, num_chunks))
        while left:
            for key, _ in selector.select():
                left -= key.data(wire.receive(key.fileobj))


def _reading(sock: socket.socket, num_chunks: int) -> Callable[[object], bool]:
    there: set[int] = set()
    state = {"cursor": 0, "asked": 0, "ahead": 1}

    def heard(message: object) -> bool:
        if isinstance(message, PassOpened):
            state["ahead"] = message.num_ahead
        else:
            assert isinstance(message, ChunkReady)
            there.add(message.chunk)
        cursor = state["cursor"]
        if cursor in there:
            there.discard(cursor)
            cursor = state["cursor"] = cursor + 1
        elif isinstance(message, ChunkReady):
            return False
        if cursor == num_chunks:
            wire.send(sock, ClosePass(pass_id=1, num_consumed=0, waited_s=0.0, end=cursor))
            return True
        ahead: tuple[int, ...] = ()
        if state["asked"] <= cursor:
            state["asked"] = min(cursor + 1 + state["ahead"], num_chunks)
            ahead = tuple(range(cursor + 1, state["asked"]))
        needed = () if cursor in there else (cursor,)
        released = (cursor - 2,) if cursor > 1 else ()
        wire.send(sock, Advance(1, cursor, needed, ahead, released))
        if not needed:
            return heard(ChunkReady(1, cursor, 0, 0))
        return False

    return heard


def serve(num_preprocessors: int, num_readers: int, num_chunks: int) -> None:
    """Serve a pass over so many chunks to all readers."""
    pipeline = SharedPipeline(train=Numbers(num_chunks * IMAGES))
    setup = pipeline.packed().setup(num_preprocessors)
    chunk_bytes = IMAGES * SAMPLE_BYTES
    wanted = replace(setup.wanted, memory_bytes=MEMORY_BYTES, chunk_bytes=chunk_bytes)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pairs = [wire.socket_pair() for _ in range(num_readers)]
    children = [_fork(lambda: preprocess(theirs))]
    children.append(_fork(lambda: read([end for _, end in pairs], num_chunks)))
    number = iter(range(1 << 30, 1 << 31))

    def spawn(_: Any) -> tuple[int, socket.socket]:
        ours, other = wire.socket_pair()
        socket.send_fds(control, [b"x"], [other.fileno()])
        other.close()
        return next(number), ours

    with selectors.DefaultSelector() as selector:
        server = PipelineServer(replace(setup, wanted=wanted), spawn=spawn, selector=selector)
        for reader, (ours, _) in enumerate(pairs):
            server.add_reader(reader, ours)
        began, cpu = time.perf_counter(), time.process_time()
        ended = os.pidfd_open(children[1])
        running = [True]
        selector.register(ended, selectors.EVENT_READ, lambda mask: running.clear())
        while running:
            for key, mask in selector.select():
                key.data(mask)
        elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        made = server.stats().preprocessed
    os.kill(children[0], signal.SIGKILL)
    if os.waitpid(children[1], 0)[1]:
        raise SystemExit("The readers failed: nothing was measured.")
    images = num_chunks * IMAGES
    print(
        f"{num_preprocessors} preprocessors, {num_readers} readers, {num_chunks} chunks of "
        f"{IMAGES} images ({made} made): {1e6 * cpu_s / num_chunks:.0f} us of the broker's CPU "
        f"per chunk, {images / cpu_s:,.0f} images/s of a core ({images / elapsed_s:,.0f} here)"
    )


def _fork(main: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            main()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def keep_books(num_preprocessors: int, num_readers: int, num_chunks: int) -> Iterator[str]:
    """A million chunks through the store, by readers that are a few hundred chunks apart."""
    for resident in (200, 2_000, 20_000):
        size = 4096
        extents = Extents(memory_bytes=resident * size, disk_begin=1 << 50, disk_bytes=0)
        store = ChunkStore(Space(extents), window=2 * num_preprocessors + 2)
        store.set_size("train", num_samples=num_chunks, chunk_size=1, chunk_bytes=size)
        cursors = [-3 * number for number in range(num_readers)]
        for number in range(num_readers):
            store.open_pass((number, 0), "train", 0, 0)
        flying: deque[ChunkKey] = deque()
        began = time.process_time()
        while min(cursors) < num_chunks:
            for number, cursor in enumerate(cursors):
                cursors[number] += 1
                if not 0 <= cursor < num_chunks:
                    continue
                store.move((number, 0), cursor)
                store.release((number, 0), [cursor - 1])
                store.request((number, 0), cursor, urgent=True)
                while not _was_lent(store, number):
                    if (order := store.assign()) is not None:
                        flying.append(order.key)
                    store.produced(flying.popleft(), size)
            while len(flying) < num_preprocessors and (order := store.assign()) is not None:
                flying.append(order.key)
        each_us = 1e6 * (time.process_time() - began) / num_chunks
        yield f"room for {resident} chunks: {each_us:.1f} us per chunk, for all readers together"


def _was_lent(store: ChunkStore, number: int) -> bool:
    told = [*store.outbox]
    store.outbox.clear()
    return any(reader == number and isinstance(said, ChunkReady) for reader, said in told)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--preprocessors", type=int)
    parser.add_argument("--readers", type=int)
    given = parser.parse_args()
    if given.store:
        counts = given.preprocessors or 64, given.readers or 16, given.chunks or 1_000_000
        for line in keep_books(*counts):
            print(line)
    else:
        serve(given.preprocessors or 56, given.readers or 8, given.chunks or 20_000)


if __name__ == "__main__":
    main()
