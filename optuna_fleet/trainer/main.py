"""The trainer process: waits for runs, runs the objective, says how it ended."""

from __future__ import annotations

import gc
import os
import pickle
import random
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import FleetError, TrialError
from optuna_fleet.executor.channel import Channel, connect
from optuna_fleet.messages import Ended, Quit, Raised, RunTrial, TrainerReady
from optuna_fleet.pipeline import PipelineSpec
from optuna_fleet.resources import Device
from optuna_fleet.trainer.session import Session, Yielded, packed
from optuna_fleet.trainer.training import Training
from optuna_fleet.trainer.trial import FleetTrial

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader import PipelineClient


class Trainer:
    """One device slot's process; lives through many runs, so torch and CUDA are set up once."""

    def __init__(
        self, device: Device, channel: Channel, pipeline: PipelineClient | None, num_threads: int
    ) -> None:
        self._device = device
        self._channel = channel
        self._pipeline = pipeline
        self._num_threads = num_threads
        self._objectives: dict[int, Any] = {}

    def serve(self) -> None:
        """Run trials until told to quit or cut off."""
        while True:
            message = self._channel.receive()
            match message:
                case RunTrial():
                    self._channel.send(self._run(message))
                    if message.gc_after_trial:
                        gc.collect()
                case Quit():
                    return
                case _:
                    pass  # a late reply to a run that is over

    def _run(self, run: RunTrial) -> Ended:
        session = Session(self._channel, run)
        training = Training(session, self._pipeline, self._device.kind)
        waited_s = self._pipeline.waited_s if self._pipeline else 0.0
        value, error = None, None
        try:
            _seed(run.seed, run.number)
            self._limit_threads()
            objective = self._objective(run)
            if run.world_size > 1:
                training.start()
            value = objective(FleetTrial(session, training))
            ending = Ending.RETURNED
        except Yielded:
            ending = Ending.YIELDED
        except (EOFError, ConnectionError):
            os._exit(1)  # the driver is gone; the agent ends this process too
        except BaseException as raised:
            ending, error = Ending.RAISED, packed(raised)
        ended_s = time.time()
        usage = training.end()
        if self._pipeline is not None:
            usage = replace(usage, data_wait_s=self._pipeline.waited_s - waited_s)
        value, error, ending = _fit_to_travel(value, error, ending, run)
        return Ended(
            run_id=run.run_id,
            rank=run.rank,
            device=self._device.index,
            time_s=ended_s,
            ending=ending,
            value=value,
            error=error,
            usage=usage,
        )

    def _objective(self, run: RunTrial) -> Any:
        if run.objective is not None:
            self._objectives.clear()
            try:
                self._objectives[run.objective_id] = pickle.loads(run.objective)
            except Exception as error:
                raise FleetError(
                    f"The objective can't be loaded in a trainer: {type(error).__name__}: {error}. "
                    "What it refers to must be importable there as it is in your script."
                ) from error
        return self._objectives[run.objective_id]

    def _limit_threads(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and self._device.kind == "cpu":
            torch.set_num_threads(self._num_threads)


def trainer_main(
    device: Device,
    *,
    host: str,
    port: int,
    secret: bytes,
    data: socket.socket,
    spec: PipelineSpec | None,
    num_threads: int,
) -> None:
    """Body of a trainer process, forked from its node's agent."""
    if device.kind != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible(device.local)
    channel = connect(host, port, secret)
    channel.send(TrainerReady(device=device.index, pid=os.getpid()))
    pipeline = _client(data, spec) if spec is not None else None
    try:
        Trainer(device, channel, pipeline, num_threads).serve()
    except (EOFError, ConnectionError):
        pass


def _client(data: socket.socket, spec: PipelineSpec) -> PipelineClient:
    from optuna_fleet.pipeline.reader import PipelineClient  # imports torch

    return PipelineClient(data, spec)


def _visible(local: int) -> str:
    """The physical device behind CUDA ordinal `local`, if the user had restricted them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[local].strip() if visible else str(local)


def _seed(seed: int, number: int) -> None:
    """Seed every generator that is loaded, alike on every rank and at every resume (G2)."""
    if "torch" in sys.modules:
        from optuna_fleet.trainer.randomness import seed_everything

        seed_everything(seed, number)
        return
    import numpy as np

    words = np.random.SeedSequence([seed, number]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))


def _fit_to_travel(
    value: Any, error: Raised | None, ending: Ending, run: RunTrial
) -> tuple[Any, Raised | None, Ending]:
    """A value that can't be pickled fails its trial; 0-d tensors become the numbers they hold."""
    if run.rank != 0:
        return None, error, ending
    try:
        value = _plain(value)
        pickle.dumps(value)
    except Exception as trouble:
        message = f"The value {value!r} that the objective returned can't be sent: {trouble}"
        return None, packed(TrialError(message)), Ending.RAISED
    return value, error, ending


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
