"""The driver of one `optimize` call: waits for events, asks the controller, has it done.

The only code that blocks. Everything that touches the study happens here, on the caller's thread.
What messages mean is in `receiver`, what instructions do in `performer`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from optuna_fleet.events import Event, PlanDecided
from optuna_fleet.exceptions import FleetError, LaunchError
from optuna_fleet.executor.call.parts import Parts
from optuna_fleet.executor.call.performer import Performer
from optuna_fleet.executor.call.receiver import Receiver
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.wire.inbox import Inbox

_AT_ONCE = 256
"""So many events are taken, and then it is looked at what no event tells of."""


class Driver:
    """Connects study, controller, solver and trainers for one call.

    Attributes:
        interrupts: To be entered while it runs.
        has_freed_devices: Whether no trainer is still at work for this call.
    """

    def __init__(self, parts: Parts, controller: Controller) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._journal = parts.journal
        self._controller = controller
        self._receiver = Receiver(parts)
        self._performer = Performer(parts)
        self._events: list[Event] = []
        self.interrupts = Interrupts(parts.runtime.inbox)
        self.has_freed_devices = False

    def run(self) -> None:
        """Run until every trial is done.

        Raises:
            BaseException: KeyboardInterrupt, or a failure of the fleet itself; at once.
        """
        parts = self._parts
        self._events += self._receiver.growth()
        parts.devices.begin(self._journal.now())
        self._events += self._runtime.devices_at_first()
        for number in parts.proposals.adopted():
            parts.ledger.note_restart(number)
        try:
            self._work()
            while not self._controller.finished:
                parts.note_call()
                self._wait()
                self._work()
            self.has_freed_devices = True
            parts.devices.end(self._journal.now())
            self._end_log("failed" if parts.outcomes.failure else "done")
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            parts.calls.end()
            parts.checks.end()

    def _wait(self) -> None:
        self.interrupts.check()
        parts, inbox = self._parts, self._runtime.inbox
        wait_s = max(0.0, min(self._waits_s()))
        for _ in range(_AT_ONCE):
            if (event := inbox.get(wait_s)) is None:
                break
            wait_s = 0.0
            for message in self._runtime.heard(event):
                self._events += self._receiver.take(message)
                self._work()
        if parts.calls.go_on():
            self._events += parts.outcomes.propose(again=True)
        if (plan := self._performer.plan) is not None and plan.done():
            self._performer.plan = None
            self._events.append(PlanDecided(plan=plan.result()))
        for device in parts.deadlines.take_expired():
            self._runtime.kill(device)
        parts.saves.save_within_epochs()
        for fault in parts.watchdog.check():
            self._events += self._receiver.stop_faulty(fault)
        self._events += self._receiver.due()

    def _waits_s(self) -> list[float]:
        parts = self._parts
        return [
            *parts.deadlines.waits_s(),
            *self._receiver.waits_s(),
            *parts.progress.waits_s(),
            *parts.watchdog.waits_s(),
            *parts.saves.waits_s(),
        ]

    def _work(self) -> None:
        if not self._events:
            return
        while self._events:
            events, self._events = self._events, []
            for event in events:
                self._journal.note(event)
            self._parts.devices.write()
            for instruction in self._controller.handle(*events):
                self._journal.note(instruction)
                self._events += self._performer.carry_out(instruction)
        self._runtime.agents.want(self._controller.most_usable)

    def _end_log(self, ending: str) -> None:
        self._parts.progress.end(ending, self._parts.proposals.num_asked)

    def _abandon(self, error: BaseException) -> None:
        """End what flies: fail those trials, give back those that never flew, free the devices.

        A second Ctrl-C ends this at whatever it is, and `has_freed_devices` stays false.
        """
        if not isinstance(error, FleetError | KeyboardInterrupt):
            self._journal.attach_to(error)
        runs, launched = self._parts.runs, self._parts.launcher.launched
        busy = {device for run in runs.values() for device in run.launch.devices}
        try:
            if self._performer.plan is not None:
                self._runtime.allocator.close()
            self._parts.outcomes.end_all(launched, runs.values(), error)
            self._end_log("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        finally:
            is_fit = not isinstance(error, LaunchError)
            self.has_freed_devices = is_fit and self._runtime.reset(busy)


class Interrupts:
    """While entered, a Ctrl-C that was dropped is remembered.

    Python drops what is raised while a finalizer or the callback of a weak reference runs, as they
    do each time that a database's cursor is let go of. And nothing is raised where a message could
    be lost by it that was read already.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._came = False

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._hear)

    def __exit__(self, *exc_info: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._inbox.is_at_work:
            raise KeyboardInterrupt
        self._inbox.put(None)  # whoever takes comes back to `check`

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came, which can only have been dropped."""
        if self._came:
            raise KeyboardInterrupt
