"""What `sharing.py` measures: one `SharedPipeline` for all trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sharing_crew import Epochs, Trial, endless, serve
from sharing_photos import CROPS, Photographs, Ready, dataset_of

from optuna_fleet import SharedPipeline, take_apart

WARM_SAMPLES = 64


@contextmanager
def setup(request: dict[str, Any]) -> Iterator[tuple[Epochs, Callable[[], Any]]]:
    train, stages = dataset_of(request), {}
    if isinstance(train, Photographs):
        train, *parts = take_apart(train, augment=0, finish=len(CROPS[request["crop"]]()))
        names = ("augment", "finish")
        stages = {name: {"train": part} for name, part in zip(names, parts, strict=True) if part}
    pipeline = SharedPipeline(
        train=train,
        warm=Ready(WARM_SAMPLES),
        **stages,
        shuffled=[] if request["data"] == "ready" else ["train"],
        num_preprocessors=request["preprocessors"],
        **request.get("options", {}),
    )

    @contextmanager
    def epochs(trial: Trial) -> Iterator[Iterable[Any]]:
        def epoch_of(epoch: int) -> Iterable[Any]:
            last = epoch + 1 == trial.epochs
            return reader.batches(
                "train", batch_size=trial.batch_size, epoch=epoch, continues=not last
            )

        with handle.connect() as reader:
            yield endless(epoch_of, trial.epochs)

    with pipeline:
        handle = pipeline.handle()
        # Starts the preprocessors; where the data is ready, also makes all of its chunks.
        names = ["warm", "train"] if request["data"] == "ready" else ["warm"]
        for name in names:
            for _ in pipeline.batches(name, batch_size=32, epoch=0):
                pass
        before = pipeline.stats().preprocessed

        def told() -> Any:
            stats = asdict(pipeline.stats())
            return {**stats, "preprocessed": stats["preprocessed"] - before}

        yield epochs, told


if __name__ == "__main__":
    serve(setup)
