"""The floor of `sharing.py`: a process that makes each sample and reads it, without any loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sharing_crew import Epochs, Trial, endless, serve
from sharing_photos import dataset_of


@contextmanager
def setup(request: dict[str, Any]) -> Iterator[tuple[Epochs, Callable[[], Any]]]:
    dataset: Any = dataset_of(request)

    def samples(_: int) -> Iterator[Any]:
        for place in torch.randperm(len(dataset)).tolist():
            image, index = dataset[place]
            yield image, torch.tensor([index])

    @contextmanager
    def epochs(trial: Trial) -> Iterator[Iterable[Any]]:
        yield endless(samples, trial.epochs)

    yield epochs, lambda: None


if __name__ == "__main__":
    serve(setup)
