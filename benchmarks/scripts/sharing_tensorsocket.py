"""TensorSocket 0.0.5 (optional), with what it takes to work on a CPU.

As published it pickles whole batches for each consumer and may stall at its first acknowledgement;
here batches lie in shared files of which only names are sent, and the socket for acknowledgements
subscribes before the first batch.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from sharing_crew import Epochs, Trial, endless, serve
from sharing_photos import dataset_of
from tensorsocket.consumer import TensorConsumer
from tensorsocket.producer import TensorPool, TensorProducer
from torch.utils.data import DataLoader

BATCH_SIZE = 32
NUM_BATCHES_AHEAD = 10


class SharedFiles(TensorPool):
    """TensorSocket's circular buffer, in files in shared memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NUM_BATCHES_AHEAD)
        self._folder = folder
        self._paths: dict[int, tuple[str, int]] = {}

    def assign(self, data: Any) -> Any:
        """Copy the batch into the next slot, which is made if there is none yet."""
        slot = (self.index + 1) % self.max_size
        if self.pool[slot] is None:
            self.pool[slot] = tuple(self._place(f"{slot}.{i}", t) for i, t in enumerate(data))
        return super().assign(data)

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        path, nbytes = str(self._folder / name), tensor.nbytes
        place = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._paths[place.untyped_storage().data_ptr()] = (path, nbytes)
        return place.view(tensor.dtype).view(tensor.shape)

    def pack(self, data: Any) -> Any:
        """Where the slices are, instead of the slices."""
        return tuple(
            (
                *self._paths[part.untyped_storage().data_ptr()],
                part.dtype,
                part.storage_offset(),
                tuple(part.shape),
            )
            for part in data
        )


@cache
def _mapped(path: str, nbytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _unpack(data: Any) -> Any:
    return tuple(
        _mapped(path, nbytes).view(dtype)[offset : offset + torch.Size(shape).numel()].view(shape)
        for path, nbytes, dtype, offset, shape in data
    )


class _Late:
    """A DataLoader whose workers start with its first batch, not when they are announced."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


def _produce(request: dict[str, Any], ports: list[int], folder: Path, num_epochs: int) -> None:
    torch.set_num_threads(1)
    loader = DataLoader(
        dataset_of(request),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=request["preprocessors"],
    )
    pool = SharedFiles(folder)
    producer = TensorProducer(
        _Late(loader),
        *ports[:2],
        heart_ports=(ports[2], ports[3]),
        pack_fn=pool.pack,
        consumer_max_buffer_size=NUM_BATCHES_AHEAD,
    )
    producer.pool = pool
    while len(producer.hb.consumers) < len(request["trials"]):
        time.sleep(0.05)
    producer.ack_socket.poll(1000)
    for _ in range(num_epochs):
        for _ in producer:
            pass
    time.sleep(PARTING_S)


PARTING_S = 1.0


@contextmanager
def setup(request: dict[str, Any]) -> Iterator[tuple[Epochs, Callable[[], Any]]]:
    ports = _free_ports(4)
    folder = Path(tempfile.mkdtemp(prefix="sharing-", dir="/dev/shm"))
    num_epochs = max(trial.get("epochs", 1) for trial in request["trials"])

    @contextmanager
    def epochs(trial: Trial) -> Iterator[Iterable[Any]]:
        def epoch_of(epoch: int) -> Iterable[Any]:
            nonlocal consumer
            # Made after "go": its constructor returns when the first batch has been loaded.
            consumer = consumer or TensorConsumer(
                *ports[:2],
                heart_ports=(ports[2], ports[3]),
                unpack_fn=_unpack,
                batch_size=trial.batch_size,
            )
            return consumer

        consumer: Any = None
        yield endless(epoch_of, trial.epochs)

    producer = get_context("fork").Process(
        target=_produce, args=(request, ports, folder, num_epochs)
    )
    producer.start()
    try:
        yield epochs, lambda: None
    finally:
        producer.terminate()
        producer.join()
        shutil.rmtree(folder)


def _free_ports(number: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


if __name__ == "__main__":
    serve(setup)
