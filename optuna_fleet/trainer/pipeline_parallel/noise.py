"""Random numbers of layers: the same masks of dropout, however many stages there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


class Noise:
    """Seeds each layer's forward pass from (seed, minibatch, layer).

    The generators are then what they were, as objectives draw from them too.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, seed: tuple[int, ...]
    ) -> None:
        self._device = device
        self._seed = seed
        self._minibatch: int | None = None
        places: dict[nn.Module, deque[int]] = {}
        for place, layer in layers.items():  # a module may be several of the layers
            places.setdefault(layer, deque()).append(place)
        self._handles = [
            layer.register_forward_pre_hook(lambda *_, own=own: self._begin(own))
            for layer, own in places.items()
        ]

    def close(self) -> None:
        """The layers are what they were."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def of(self, minibatch: int) -> Iterator[None]:
        """The forward pass of a minibatch, counted over the whole training."""
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            self._minibatch = minibatch
            try:
                yield
            finally:
                self._minibatch = None

    def _begin(self, places: deque[int]) -> None:
        if self._minibatch is None:
            return
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._minibatch, places[0]))
        places.rotate(-1)
        seed = int(sequence.generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.cuda.manual_seed(seed)
