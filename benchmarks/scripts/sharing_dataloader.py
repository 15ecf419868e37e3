"""What `sharing.py` compares with: a DataLoader of one worker in each trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sharing_crew import Epochs, Trial, endless, serve
from sharing_photos import dataset_of
from torch.utils.data import DataLoader


@contextmanager
def setup(request: dict[str, Any]) -> Iterator[tuple[Epochs, Callable[[], Any]]]:
    dataset = dataset_of(request)

    @contextmanager
    def epochs(trial: Trial) -> Iterator[Iterable[Any]]:
        loader = DataLoader(
            dataset,
            batch_size=trial.batch_size,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
        )
        yield endless(lambda epoch: loader, trial.epochs)

    yield epochs, lambda: None


if __name__ == "__main__":
    serve(setup)
