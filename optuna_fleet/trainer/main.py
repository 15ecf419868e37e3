"""The trainer process: waits for runs, runs the objective, says how it ended."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optuna import TrialPruned

from optuna_fleet.accelerator import accelerator_of, in_use
from optuna_fleet.events import Ending
from optuna_fleet.exceptions import (
    LaunchError,
    PipelineLostError,
    RetryableError,
    is_for_want_of_peers,
    is_of_device,
    is_out_of_memory,
)
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.processes import flush_prints
from optuna_fleet.resources import Device
from optuna_fleet.trainer.heartbeat import sending_heartbeats
from optuna_fleet.trainer.link import Inbox
from optuna_fleet.trainer.objective import LoadedObjective, once_torch_is_imported
from optuna_fleet.trainer.randomness import seed_run, seed_torch
from optuna_fleet.trainer.remote import Remote
from optuna_fleet.trainer.session import DriverGoneError, Session, Yielded, no_driver
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.messages import Ended, RunTrial, TrainerReady
from optuna_fleet.wire.node_messages import ProcessId, Quit
from optuna_fleet.wire.packing import pack, pack_error, plain

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import PipelineClient
    from optuna_fleet.trainer.saving import Held
    from optuna_fleet.trainer.training import Training


_SECOND_GROUP = "initialize the default process group twice!"
_TOO_LARGE = (
    "If the model is too large for a device, trial.pipeline() trains it in stages on several; if "
    "its batches are, trial.prepare(..., min_devices=2) gives each device a part of them."
)
_NO_TERMINAL = (
    "A debugger has no terminal in a trainer, which is another process: "
    'FleetExecutor(..., cluster="inline") runs trials one by one in your own, under your debugger.'
)
# Errors kept alive on purpose: freeing the pinned memory in their frames aborts the process once
# the GPU has failed.
_kept: list[BaseException] = []


class Trainer:
    """One device slot's process; lives through many runs, so torch and the GPU are set up once."""

    def __init__(
        self,
        device: Device,
        channel: Channel,
        pipeline: PipelineClient | None,
        num_threads: int,
        dial: Callable[[], Channel] = no_driver,
    ) -> None:
        self._device = device
        self._dial = dial
        self._inbox = Inbox(channel)
        self._pipeline = pipeline
        self._objective = LoadedObjective(
            num_threads, has_gpu=device.type != "cpu", resolve=self._stand_in
        )
        self._session: Session | None = None
        self._held: tuple[int, Held] | None = None  # what a run has left, for the next one
        self._trial = (-1, -1)  # of the last run: its objective and number
        self._is_spent = False

    def serve(self) -> None:
        """Run trials until told to quit, or the driver is gone."""
        while True:
            message = self._inbox.next_order()
            match message:
                case RunTrial():
                    ended = self._run(message)
                    flush_prints()  # trainers are killed in the end
                    collect = message.gc_after_trial
                    is_last = self._is_spent or not clean_up(collect=collect)
                    # The process ends, so the state it holds must be on disk first
                    if is_last and self._held:
                        self._held[1].saver.finish()
                    self._inbox.send(replace(ended, is_last=is_last))
                    if is_last:
                        return
                case Quit():
                    return

    def _run(self, run: RunTrial) -> Ended:
        """Run the objective; return how that ended."""
        last, self._trial = self._trial, (run.objective_id, run.number)
        forget_compiled(is_same=self._trial == last)
        session = Session(self._inbox, run, self._dial, self._device.index)
        self._session = session
        try:
            with sending_heartbeats(session, run.heartbeat_s):
                return self._run_in(session)
        except LaunchError as error:
            return session.ended(Ending.ABORTED, error=pack_error(error))

    def _run_in(self, session: Session) -> Ended:
        run = session.run
        if self._held and (run.rank, run.held) != (0, self._held[0]):
            self._held = None
        trial = FleetTrial(session, partial(self._training, session))
        value, error, way_out = b"", None, ""
        has_device_failed = False
        alone = False  # whether this rank ends while the others go on
        try:
            # First, because importing what it refers to may run code that draws or seeds.
            objective = self._objective.of(run)
            seed_run(run.seed, run.number)
            with once_torch_is_imported(partial(self._set_up_torch, run)):
                returned = self._called(objective, trial, session)
            way_out = "returned"
            session.leave(way_out)
            value = _finished(returned, trial.opened)
            ending = Ending.RETURNED
        except Yielded:  # perhaps when it had returned
            ending, way_out = Ending.YIELDED, ""
        except DriverGoneError:
            raise
        except RetryableError as trouble:
            ending, error, alone, way_out = Ending.ABORTED, pack_error(trouble), True, ""
            self._is_spent = isinstance(trouble, PipelineLostError)
        except BaseException as raised:
            if self._inbox.is_forked:  # the process ends as it would end a script
                raise
            ending = _ending_of(raised, session.run)
            error = pack_error(_explained(raised, trial.opened))
            is_broken = trial.opened is not None and trial.opened.is_broken
            alone = is_broken or not isinstance(raised, TrialPruned)
            way_out = "" if alone else "was pruned"
            has_device_failed = is_of_device(raised)
            self._is_spent = has_device_failed or is_out_of_memory(raised)
            if not gpu_works(waits=False):
                _kept.append(raised)
                self._is_spent = True
        session.leave(way_out)
        ended = session.ended(
            ending, value=value, error=error, has_device_failed=has_device_failed
        )
        if (training := trial.opened) is None or _kept:
            return ended
        usage, held = training.end(alone=alone), training.leaving.held
        self._is_spent |= training.is_stuck
        if held is not None:
            self._held = ended.run_id, held
        return replace(ended, usage=usage, holds=held is not None)

    def _set_up_torch(self, run: RunTrial) -> None:
        """Give torch this trial's settings, seeds and process group before it begins."""
        self._objective.adopt_torch()
        if run.world_size == 1:
            from optuna_fleet.trainer.groups import join_group

            join_group(run, self._device.type)
        seed_torch(run.seed, run.number)

    def _called(self, objective: Any, trial: FleetTrial, session: Session) -> Any:
        if trial.world_size > 1:
            trial._training  # noqa: B018 - joins the group of its ranks
        try:
            returned = objective(trial)
        finally:
            # Raise `Yielded` or `DriverGoneError` again if the objective caught it
            session.check()
        if self._inbox.is_forked:
            sys.exit()
        return returned

    def _training(self, session: Session) -> Training:
        from optuna_fleet.trainer.training import Training  # imports torch

        kept, self._held = self._held, None  # its memory is needed
        held = kept[1] if kept else None
        return Training(session, self._pipeline, self._device.type, held)

    def _stand_in(self, target: str) -> Remote:
        """Stands for the objective's study or storage: its calls go to the driver's."""

        def session() -> Session:
            assert self._session is not None
            return self._session

        return Remote(session, target)


def trainer_main(
    device: Device,
    *,
    agent: str,
    invitation: Invitation,
    data: socket.socket,
    spec: PipelineSpec | None,
    num_threads: int,
) -> None:
    """Body of a trainer process, forked from its node's agent."""
    if device.type != "cpu":
        os.environ[accelerator_of(device.type).visible] = device.visible
    pipeline = None
    if spec is not None:
        from optuna_fleet.pipeline.reader.client import PipelineClient  # imports torch

        pipeline = PipelineClient(data, spec)
    dial = partial(connect, invitation)
    try:
        channel = dial()
    except ConnectionRefusedError:
        return  # the sweep was over before this process had started
    process = ProcessId(agent, os.getpid())
    if problem := ailment_of(device):
        channel.send(TrainerReady(device=device.index, process=process, problem=problem))
        return
    trainer = Trainer(device, channel, pipeline, num_threads, dial)
    # The end of the channel is the end of the sweep: the agent ends this process too.
    with contextlib.suppress(OSError, DriverGoneError):
        channel.send(TrainerReady(device=device.index, process=process))
        trainer.serve()


def _ending_of(raised: BaseException, run: RunTrial) -> Ending:
    if is_of_device(raised):
        return Ending.ABORTED
    if run.world_size > 1 and is_for_want_of_peers(raised):
        return Ending.DISCONNECTED
    return Ending.RAISED


def _explained(raised: BaseException, training: Training | None) -> BaseException:
    """The exception, whose traceback begins in the objective where it comes from there.

    Advice is added for a debugger, a model too large for a device, and `init_process_group` left
    over from torchrun.
    """
    trace = raised.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    raised.with_traceback(trace)
    if type(raised).__name__ == "BdbQuit":
        raised.args = (_NO_TERMINAL,)
    is_whole = training is None or training.in_stages is None
    if is_whole and isinstance(raised, RuntimeError) and is_out_of_memory(raised):
        raised.args = (f"{raised} {_TOO_LARGE}",)
    if isinstance(raised, ValueError) and str(raised).endswith(_SECOND_GROUP):
        raised.args = (
            f"{raised} Inside an objective the default group is the trial's own: leave out "
            "`init_process_group`, and `destroy_process_group`.",
        )
    return raised


def _finished(value: Any, training: Training | None) -> bytes:
    """The objective's value, packed; scalar tensors become the numbers they hold.

    A value that can't be pickled (a generator) is replaced by its type's name, which Optuna
    rejects with its own message.

    Raises:
        TrialError: The trial did not go on where it was checkpointed.
    """
    if training is not None and not training.is_broken:
        training.check_ranks()
        training.kept.check_reached()
        training.leaving.leave_final(value)
    try:
        return pack(plain(value))
    except Exception:
        return pack(str(type(value)))


# -- whether the device works, and the process can serve another run ------------------------------


def ailment_of(device: Device) -> str:
    """Returns what is wrong with this process's device, in words, or "".

    A GPU is tried where torch was imported; without it no trial uses one.
    """
    torch: Any = sys.modules.get("torch")
    if device.type == "cpu" or torch is None:
        return ""
    try:
        torch.ones(1, device=device.type).add_(1)
        accelerator_of(device.type).module.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gpu_works(*, waits: bool) -> bool:
    """Whether this process can go on to use its GPU, if it does: errors there are for good.

    To wait for all that the GPU has to do takes for ever if other ranks have left a collective.
    """
    if (accelerator := in_use()) is None:
        return True
    gpu = accelerator.module
    try:
        gpu.synchronize() if waits else gpu.current_stream().query()
    except RuntimeError:
        return False
    return True


def clean_up(*, collect: bool) -> bool:
    """Free what the run held; return whether the process can serve another one."""
    if not gpu_works(waits=True):
        return False
    accelerator = in_use()
    if collect or accelerator:
        gc.collect()
    if accelerator:
        accelerator.module.empty_cache()
    return True


def forget_compiled(*, is_same: bool) -> None:
    """Drop what earlier runs have compiled here: else it decides how other trials' code is.

    A trial that has moved, `is_same`, finds what it has compiled, if that can be used again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and _has_compiled(dynamo) and not (is_same and _is_of_use(dynamo)):
        dynamo.reset()
        if accelerator := in_use():
            accelerator.module.empty_cache()


def _has_compiled(dynamo: Any) -> bool:
    """Whether it has, or torch does not say: with a GPU a reset takes seconds."""
    codes = getattr(dynamo.convert_frame, "input_codes", None)
    return bool(getattr(codes, "seen", True))


def _is_of_use(dynamo: Any) -> bool:
    """Whether what was compiled can be used again, or torch does not say.

    Torch limits how often it compiles a function, beyond that it does not. What was compiled for
    classes that are gone, or hooks, counts too.
    """
    try:
        limit = dynamo.config.recompile_limit
        entries_of = dynamo.eval_frame._debug_get_cache_entry_list
        codes = [known() for known in dynamo.convert_frame.input_codes.seen]
        guards = [[entry.guard_manager for entry in entries_of(code)] for code in codes if code]
    except AttributeError:
        return False
    is_near = any(len(of_one) > limit // 2 for of_one in guards)
    return not is_near and not any(
        type(guard).__name__ == "DeletedGuardManagerWrapper"
        for of_one in guards
        for guard in of_one
    )
