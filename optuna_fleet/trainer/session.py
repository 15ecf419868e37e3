"""A trainer's side of one run: calls to the driver in all ranks' name, and how the run ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from optuna_fleet.events import Ending
from optuna_fleet.trainer.link import Inbox, StopLine
from optuna_fleet.wire.calls import Call, RankCall, Reply, Report
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import Ended, Progress, Remark, RunTrial
from optuna_fleet.wire.packing import pack, unpack, unpack_error

_MOST_UNANSWERED = 100  # so that neither end keeps more


class Yielded(BaseException):
    """Unwinds the objective of a trial that has been checkpointed and leaves its devices.

    Not an `Exception`, so that an objective's own ``except Exception`` lets it pass.
    """


class DriverGoneError(BaseException):
    """The control channel broke: nobody waits for this trial any more."""


def no_driver() -> NoReturn:
    """What makes connections to the driver where there is none."""
    raise ConnectionRefusedError("this process has no driver to connect to")


class Reports:
    """The values of one trial: the first of each step, as the study keeps them.

    They are those that led to where the trial is now. The study may know more: a trial that lost
    its devices repeats epochs.

    Attributes:
        values: By step, in order of report.
        best: The best of them in the study's direction, which NaN never is; None for none.
    """

    def __init__(self, maximize: bool | None) -> None:
        self.values: dict[int, float] = {}
        self.best: float | None = None
        self._sign = 1.0 if maximize else -1.0

    @property
    def last_step(self) -> int | None:
        """The last step of them, as `optuna.trial.FrozenTrial.last_step`."""
        return max(self.values, default=None)

    def add(self, value: float, step: int) -> bool:
        """Note what was reported; return whether it is the best so far."""
        if step in self.values:
            return False
        self.values[step] = value
        best = self.best
        if math.isnan(value) or (best is not None and self._sign * value <= self._sign * best):
            return False
        self.best = value
        return True

    def begin_with(self, history: Mapping[int, float]) -> None:
        """Put what was reported up to a checkpoint before what was reported in this run."""
        own, self.values, self.best = self.values, {}, None
        for step, value in [*history.items(), *own.items()]:
            self.add(value, step)


class Session:
    """Carries the calls of one rank to the driver.

    Calls are numbered; rank 0's call number i is carried out, the other ranks get its answer for
    theirs. So every rank sees the same suggestion, the same verdict of the pruner, the same
    exception.

    Attributes:
        device: What the driver calls this process's device.
        dial: Makes further connections to the driver.
        reports: What the trial has reported so far, wherever it flew.
        choices: Which of the choices were suggested, objects too, in words.
        is_waiting: For the driver's answer.
    """

    def __init__(
        self,
        inbox: Inbox | None,
        run: RunTrial,
        dial: Callable[[], Channel] = no_driver,
        device: int = 0,
    ) -> None:
        self.run = run
        self.device = device
        self.dial = dial
        self.stop_line = StopLine() if inbox is None else inbox.stop_line(run.run_id)
        self.began = time.perf_counter()
        self.reports = Reports(run.maximize)
        self.choices: dict[str, str] = {}
        self.is_waiting = False
        self._num_batches = 0
        self._collectives: tuple[tuple[int, str, int], ...] = ((0, "", 0),)  # the last begun
        self._epoch = 0
        self._thread = threading.get_ident()
        self._is_ordered = True
        self._left_at: Progress | None = None
        self._inbox = inbox
        self._index = 0
        self._passed = (0, 0)
        self._num_unanswered = 0
        self._unwinding: type[Yielded | DriverGoneError] | None = None
        # Callbacks of training frameworks may report from threads of their own.
        self._lock = threading.RLock()

    # -- how far it is ----------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the objective is, or was when it ended."""
        if self._left_at is not None:
            return self._left_at
        while True:  # the objective goes on while another thread reads this
            num_calls, collectives = self._index, self._collectives
            if num_calls == self._index:
                break
        return Progress(
            num_batches=self._num_batches,
            num_calls=num_calls,
            passed=self._passed,
            collectives=tuple(
                (number, f"{purpose} of batch {step}" if step else purpose)
                for number, purpose, step in collectives
            ),
            epoch=self._epoch,
            is_ordered=self._is_ordered,
        )

    def begin_epoch(self, epoch: int) -> None:
        """The objective is in this one now."""
        self._epoch = epoch

    def begin_batch(self) -> None:
        """The objective gets another one."""
        self._num_batches += 1

    def begin_collective(self, purpose: str, step: int) -> None:
        """One begins, at the step of that number, or 0: others can tell how far this rank is."""
        number, *_ = self._collectives[-1]
        # At once: another thread reads it.
        self._collectives = (*self._collectives[-7:], (number + 1, purpose, step))

    def leave(self, way_out: str = "") -> None:
        """The objective has ended by that `Progress.way_out`; what it still calls is none."""
        self._left_at = replace(self.progress, way_out=way_out)

    def ended(self, ending: Ending, **fields: Any) -> Ended:
        """The message that this rank's part in the run has ended, just now."""
        return Ended(
            run_id=self.run.run_id,
            rank=self.run.rank,
            device=self.device,
            time_s=time.monotonic(),  # not of this process only, and nobody can set it
            ending=ending,
            progress=self.progress,
            **fields,
        )

    def unwind(self, why: type[Yielded | DriverGoneError]) -> NoReturn:
        """Raise `why`, and again at all that the objective asks for if it catches that."""
        self._unwinding = why  # no instance, whose traceback would keep the trial's memory
        raise why

    def check(self) -> None:
        """Raise again what unwinds the objective, if anything does."""
        if self._unwinding is None and self._inbox is not None and self._inbox.is_over:
            self._unwinding = DriverGoneError
        if self._unwinding is not None:
            raise self._unwinding

    # -- what it asks and tells -------------------------------------------------------------------

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``target.name(*args, **kwargs)`` in the driver and return its result on every rank.

        Raises:
            Exception: Whatever the call raised in the driver.
        """
        return self.ask(Call, target=target, name=name, arguments=pack((args, kwargs)))

    def read(self, target: str, name: str) -> Any:
        """Return attribute `name` of `target`."""
        return self.ask(Call, target=target, name=name, arguments=pack(((), {})), is_read=True)

    def tell(self, target: str, name: str, *args: Any, **kwargs: Any) -> None:
        """Like `call` for what returns nothing: rank 0's arguments count, others don't wait."""
        arguments = pack((args, kwargs))
        is_awaited = self.run.rank == 0
        self.ask(Call, target=target, name=name, arguments=arguments, is_awaited=is_awaited)

    def count(self) -> None:
        """A call that nobody has to carry out: all ranks come by here, none without the others."""
        with self._lock:
            self._index += 1
            self._passed = self._index, self._collectives[-1][0]  # at once, as progress is read

    def report(self, value: float, step: int) -> bool:
        """Report a value, and wait for the answer now and then only; whether it is the best."""
        with self._lock:
            self._num_unanswered += 1
            is_awaited = self._num_unanswered == _MOST_UNANSWERED
            self.ask(Report, value=value, step=step, is_awaited=is_awaited)
            return self.reports.add(value, step)

    def remark(self, keys: Iterable[str], text: str) -> None:
        """Tell the user, unless this sweep has told of all `keys`; rank 0's word counts.

        Not a call: ranks need not find the same.
        """
        if self.run.rank == 0:
            self.send(Remark(run_id=self.run.run_id, keys=tuple(keys), text=text))

    def warn(self, text: str) -> None:
        """Tell the user, whoever was told before."""
        self.remark((), text)

    def send(self, message: Any) -> None:
        """Send a message that needs no answer, from any thread; none waits for an answer's.

        Raises:
            DriverGoneError: The control channel broke, which unwinds the objective too.
        """
        if self._inbox is not None:
            try:
                self._inbox.send(message)
            except OSError:
                self.unwind(DriverGoneError)

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        """Make a call of this kind in all ranks' name, and return its answer if it is awaited."""
        self.check()
        self._is_ordered = self._is_ordered and threading.get_ident() == self._thread
        with self._lock:
            index = self._index
            call = kind(run_id=self.run.run_id, index=index, rank=self.run.rank, **fields)
            self._index += 1
            self.send(call)
            if not call.is_awaited:
                return None
            self.is_waiting = True
            reply = self._reply_to(index)
            self.is_waiting, self._num_unanswered = False, 0
        if reply.error is not None:
            raise unpack_error(reply.error)
        return unpack(reply.value) if reply.value else None

    def _reply_to(self, index: int) -> Reply:
        assert self._inbox is not None
        while True:
            if (reply := self._inbox.next_reply()) is None:
                self.unwind(DriverGoneError)
            if (reply.run_id, reply.index) == (self.run.run_id, index):
                return reply
