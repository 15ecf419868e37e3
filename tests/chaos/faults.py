"""What can go wrong, when, and what that may change: one table.

Whoever strikes is named by the verb. The demon acts from outside, on processes, files and mounts;
an order is carried out by the process that reached the moment (a raised exception, a clock).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.sweep import is_wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        verb: Name of the demon's method that plays it.
        argument: Of that method, if it takes one.
        site: Where in the sweep it strikes.
        wide: Only where the trial has several devices; its last rank is struck.
        fails: Its trial fails with this exception. All else must stay as it was.
        late: Not at the moment but up to so many seconds later, wherever its victim is then.
        alone: Costs seconds, or changes the whole machine: at most one of these in a sweep.
        needs: "namespace" (mounts of our own), "sqlite", "postgres", or nothing.
    """

    verb: str
    argument: str = ""
    site: str = "batch"
    wide: bool = False
    fails: str = ""
    late: float = 0.0
    alone: bool = False
    needs: str = ""

    @property
    def takes_all_memory(self) -> bool:
        """Whether the process that is struck must not be used again."""
        return "memory" in self.argument


_LATE_S = 1.5  # about the time from an epoch to the next, on a busy machine
_BEGIN_S = 8.0  # about that of a beginning

KINDS: dict[str, Kind] = {
    # -- processes that die -----------------------------------------------------------------------
    "kill a trainer in an epoch": Kind(verb="kill"),
    "kill a trainer after a report": Kind(verb="kill", site="report"),
    "kill a trainer as it writes a checkpoint": Kind(verb="kill", site="write"),
    "kill one rank of two": Kind(verb="kill", wide=True),
    "kill a preprocessor": Kind(verb="kill", site="sample"),
    "kill the solver at work": Kind(verb="kill", site="decision"),
    "kill the agent": Kind(verb="kill_agent", alone=True),
    "kill the driver at a trial's end": Kind(verb="kill", site="told", alone=True),
    # -- the same, wherever they are just then ----------------------------------------------------
    "kill a trainer at any time": Kind(verb="kill_role", argument="trainer", late=_LATE_S),
    "kill a preprocessor at any time": Kind(
        verb="kill_role", argument="preprocessor", late=_LATE_S
    ),
    "kill any process at any time": Kind(verb="kill_role", argument="any", late=_LATE_S),
    "kill the driver at any time": Kind(
        verb="kill_role", argument="driver", late=_LATE_S, alone=True
    ),
    "kill the driver as it begins": Kind(
        verb="kill_role", argument="driver", site="begin", late=_BEGIN_S, alone=True
    ),
    # -- processes that hang ----------------------------------------------------------------------
    "stop a trainer": Kind(verb="stop", alone=True),
    "stop one rank of two": Kind(verb="stop", wide=True, alone=True),
    "stop the agent": Kind(verb="stop_agent", alone=True),
    "stop a preprocessor": Kind(verb="stop", site="sample", alone=True),
    "stop the solver at work": Kind(verb="stop", site="decision"),
    # -- exceptions and memory --------------------------------------------------------------------
    "exception": Kind(verb="order", argument="raise", fails="InjectedError"),
    "exception on one rank": Kind(
        verb="order", argument="raise", wide=True, fails="InjectedError"
    ),
    "MemoryError": Kind(verb="order", argument="memory error", fails="MemoryError"),
    "torch.OutOfMemoryError": Kind(
        verb="order", argument="cuda memory error", fails="OutOfMemoryError"
    ),
    "address space used up": Kind(verb="order", argument="no memory", fails="RuntimeError"),
    # -- checkpoints ------------------------------------------------------------------------------
    "checkpoint torn": Kind(verb="damage", argument="torn", site="report"),
    "checkpoint with a flipped bit": Kind(verb="damage", argument="flipped", site="report"),
    "both checkpoints damaged": Kind(verb="damage", argument="both", site="report"),
    "checkpoints gone": Kind(verb="damage", argument="gone", site="report"),
    # -- disks and storages -----------------------------------------------------------------------
    "disk full": Kind(verb="fill_disk", needs="namespace", alone=True),
    "checkpoints read-only": Kind(verb="make_read_only", needs="namespace", alone=True),
    "/dev/shm full": Kind(verb="fill_shared_memory", needs="namespace", alone=True),
    "storage locked": Kind(verb="lock_storage", needs="sqlite", alone=True),
    "storage locked for a minute": Kind(
        verb="lock_storage", argument="60", needs="sqlite", alone=True
    ),
    "storage gone": Kind(verb="stop_database", needs="postgres", alone=True),
    "storage gone for a minute": Kind(
        verb="stop_database", argument="60", needs="postgres", alone=True
    ),
    # -- others -----------------------------------------------------------------------------------
    "a second driver comes": Kind(verb="order", argument="second driver", site="told", alone=True),
    # -- clocks -----------------------------------------------------------------------------------
    "clock of a trainer jumps ahead": Kind(verb="order", argument="clock forward"),
    "clock of a trainer jumps back": Kind(verb="order", argument="clock back"),
    "clock of the driver jumps ahead": Kind(verb="order", argument="clock forward", site="told"),
    "clock of the driver jumps back": Kind(verb="order", argument="clock back", site="told"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault and its moment.

    Attributes:
        kind: Its name in `KINDS`.
        trial: The trial that is struck; None at sites that belong to no trial.
        at: The epoch at "batch" and "report"; elsewhere how often the site has been reached.
        after_s: Seconds later; 0 for the moment itself.
    """

    kind: str
    trial: int | None
    at: int
    after_s: float = 0.0

    def strikes_at(self, moment: Mapping[str, int | str], count: int) -> bool:
        """Whether this moment, reached for the `count`-th time, is the fault's."""
        kind = KINDS[self.kind]
        if moment["site"] != kind.site or (
            self.trial is not None and moment["trial"] != self.trial
        ):
            return False
        if "epoch" not in moment:
            return count >= self.at
        if kind.wide:
            is_last = moment["rank"] == int(moment["ranks"]) - 1 > 0
            return is_last and int(moment["epoch"]) >= self.at
        return moment["rank"] == 0 and moment["epoch"] == self.at


def draw(kinds: list[str], lengths: Mapping[int, int], chance: random.Random) -> list[Fault]:
    """One fault of each of these kinds; nothing else strikes a trial that is to fail.

    Args:
        kinds: Names in `KINDS`, with repetitions.
        lengths: Epochs that each trial takes undisturbed.
        chance: Draws.
    """
    trials = [number for number, epochs in lengths.items() if epochs >= 5]
    faults: list[Fault] = []
    for name in sorted(kinds, key=lambda name: not KINDS[name].fails):
        kind = KINDS[name]
        possible = [n for n in trials if not kind.wide or is_wide(n)]
        fault = _drawn(name, lengths, possible, chance)
        while any(_coincide(fault, other) for other in faults):
            fault = _drawn(name, lengths, possible, chance)
        if kind.fails:
            trials.remove(fault.trial)
        faults.append(fault)
    return faults


def _coincide(one: Fault, other: Fault) -> bool:
    """Whether the second may never be played: a moment is answered once."""
    kinds = KINDS[one.kind], KINDS[other.kind]
    if one.trial is None or any(kind.late or kind.wide for kind in kinds):
        return False
    return (kinds[0].site, one.trial, one.at) == (kinds[1].site, other.trial, other.at)


def _drawn(
    name: str, lengths: Mapping[int, int], possible: list[int], chance: random.Random
) -> Fault:
    kind, trial = KINDS[name], chance.choice(possible)
    epochs = lengths[trial]
    if kind.wide:
        return Fault(kind=name, trial=trial, at=1)  # there must be an epoch to go on from
    after_s = chance.uniform(0.0, kind.late) if kind.late else 0.0
    if kind.site == "begin":
        return Fault(kind=name, trial=None, at=1, after_s=after_s)
    if kind.site in ("batch", "report"):
        first = 2 if kind.verb == "damage" else 0  # there must be something to damage
        return Fault(
            kind=name, trial=trial, at=chance.randrange(first, epochs - 1), after_s=after_s
        )
    if kind.site == "write":
        return Fault(kind=name, trial=trial, at=chance.randint(1, epochs - 2))
    return Fault(kind=name, trial=None, at=chance.randint(2, 6))
