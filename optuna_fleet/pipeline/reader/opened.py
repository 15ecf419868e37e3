"""An open pass, as the trainer sees it: the chunks that are there, asked for and given back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from optuna_fleet.exceptions import PipelineLostError, PreprocessingError
from optuna_fleet.pipeline.chunks.chunk_view import ChunkView
from optuna_fleet.pipeline.pipeline_messages import (
    Advance,
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ClosePass,
    PassOpened,
    ReleaseChunks,
)

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import PipelineClient

FromAgent = PassOpened | ChunkReady | ReleaseChunks | ChunkFailed
"""What the agent says of a pass."""


class OpenedPass:
    """Reads the chunks of an epoch; for the process that began it.

    Attributes:
        chunk_size: Samples of a chunk; 0 until the agent has told it.
        num_ahead: Chunks that may be asked for ahead.
        is_open: It was not closed, nor was the client.
    """

    def __init__(self, client: PipelineClient, number: int) -> None:
        self.chunk_size = 0
        self.num_ahead = 1
        self.is_open = True
        self._client = client
        self._number = number
        self._cursor = 0
        self._pid = os.getpid()
        self._chunks: dict[int, ChunkView] = {}
        self._places: dict[int, tuple[int, int]] = {}  # in the arena, of those that are no copies
        self._errors: dict[int, ChunkError] = {}

    def advance(
        self,
        cursor: int,
        *,
        needed: Iterable[int] = (),
        ahead: Iterable[int] = (),
        released: Iterable[int] = (),
        num_consumed: int = 0,
    ) -> None:
        """Tells the agent where the pass is, what it wants, and what it has let go of."""
        self._cursor = cursor
        chunks = tuple(needed), tuple(ahead), tuple(released)
        self._client.send(Advance(self._number, cursor, *chunks, num_consumed))

    def has(self, chunk: int) -> bool:
        """Returns whether a chunk (or the news of its failure) was taken in; takes in nothing."""
        if not self.is_open:
            raise agent_gone()  # the reader was closed
        return chunk in self._chunks or chunk in self._errors

    def take(self, chunk: int) -> ChunkView:
        """Waits for a chunk that was asked for.

        Raises:
            PreprocessingError: It could not be produced.
        """
        if not self.has(chunk):
            self._client.wait_until(lambda: self.has(chunk))
        if chunk in self._errors:
            raise PreprocessingError(self._errors[chunk].text())
        return self._chunks[chunk]

    def let_go(self, chunks: Iterable[int], *, patient: bool) -> list[int]:
        """Has chunks be written anew; returns those of them of which the agent may be told.

        Args:
            chunks: What is needed no more.
            patient: Not those of which the user has a view: the next batch is asked for while the
                last one is still bound to the loop's variables. Otherwise they are kept for him.
        """
        if not self.is_open:
            raise agent_gone()
        gone = []
        for chunk in chunks:
            view = self._chunks.get(chunk)
            if view is not None and view.is_used():
                if patient:
                    continue
                self._keep(chunk)
            elif chunk in self._places:
                self._client.mapping.clean(*self._places[chunk])
            self._chunks.pop(chunk, None)
            self._places.pop(chunk, None)
            gone.append(chunk)
        return gone

    def close(self, *, num_consumed: int = 0, waited_s: float = 0.0) -> None:
        """Ends it, at its end or before; the agent may drop its chunks. See `ClosePass`."""
        # A generator can be collected in a process that the user's code forked, whose loop goes on
        # in the parent; or when the agent is gone.
        if not self.is_open or self._pid != os.getpid():
            return
        self.let_go(list(self._chunks), patient=False)
        self.is_open = False
        self._client.forget(self._number)
        closing = ClosePass(pass_id=self._number, num_consumed=num_consumed, waited_s=waited_s)
        with suppress(PipelineLostError):
            self._client.send(closing)

    def hear(self, message: FromAgent) -> None:
        """Takes in what the agent says of this pass."""
        match message:
            case ChunkReady():
                self._view(message)
            case PassOpened():
                self.chunk_size, self.num_ahead = message.chunk_size, message.num_ahead
            case ReleaseChunks():
                self._give_back()
            case ChunkFailed():
                self._errors[message.chunk] = message.error

    def _view(self, ready: ChunkReady) -> None:
        _, chunk, address, nbytes, brief = ready
        if chunk not in self._chunks:
            found = None if brief else self._client.mapping.lend(address, nbytes)
            if found is not None:
                self._places[chunk] = address, nbytes
            else:
                found = self._client.mapping.copy(address, nbytes)
            self._chunks[chunk] = ChunkView(found)
        if chunk not in self._places:
            self.advance(self._cursor, released=[chunk])

    def _give_back(self) -> None:
        """Memory is short: what is in the arena becomes the process' own."""
        chunks = tuple(self._places)
        for chunk in chunks:
            self._keep(chunk)
        self._places.clear()
        self.advance(self._cursor, released=chunks)

    def _keep(self, chunk: int) -> None:
        if chunk in self._places:
            self._client.mapping.keep(self._places[chunk][0], self._chunks[chunk].chunk)


def agent_gone() -> PipelineLostError:
    """Returns the error for when nobody serves the pipeline any more."""
    return PipelineLostError(
        "The shared pipeline is gone: the process that serves it (in a sweep, the agent of this "
        "node) has ended or was killed. What it printed tells why."
    )
