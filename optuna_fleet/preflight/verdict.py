"""What a check has found, and what it tells the user."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not what it is on one device, undisturbed.

    Attributes:
        kind: Of what: see `records.Kind`.
        name: As the user wrote it, as far as it has a name.
        loop: Over epochs, from 1, in which it was seen.
        epoch: Mini-epoch of that, from 0.
        step: Of an optimizer, from 1, in that; None at its end.
        size: By what part of the largest number of its kind; infinite where it is of another kind.
    """

    kind: str
    name: str
    loop: int = 1
    epoch: int = 0
    step: int | None = None
    size: float = float("inf")

    def __str__(self) -> str:
        where = "at the end" if self.step is None else f"in step {self.step}"
        what = f"{self.kind} `{self.name}`" if self.name else self.kind
        size = f" by {self.size:.2g} of the largest" if self.size < float("inf") else ""
        return f"the {what} differs{size} {where} of mini-epoch {self.epoch + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a kind of trial may do.

    Attributes:
        params: That the checked trial had.
        wall_s: What the check took.
        cpu_s: Likewise, of all its processes.
        worst: The largest difference of several devices that was let pass.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    worst: float = 0.0

    @property
    def may_widen(self) -> bool:
        """Whether it gives the same on several devices."""
        return False

    @property
    def may_move(self) -> bool:
        """Whether it gives the same wherever it goes on."""
        return False

    @property
    def finding(self) -> str:
        """A few words for what was found."""
        raise NotImplementedError

    @property
    def advice(self) -> str:
        """How to mend it; empty where nothing is to be mended."""
        return ""

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        of = f" ({params})" if params else ""
        advice = f"\n  {self.advice}" if self.advice else ""
        took = f"\n  The check took {self.wall_s:.1f} s ({self.cpu_s:.1f} s of CPU time)."
        return f"Pre-flight check{of}: {self.finding}{advice}{took}"

    def _repr_html_(self) -> str:
        first, *more = str(self).split("\n")
        rest = "".join(f"<br>{html.escape(line.strip())}" for line in more)
        return f"<div><b>{html.escape(first)}</b>{rest}</div>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Verdict):
    """Any devices, any moves."""

    @property
    def may_widen(self) -> bool:
        """See `Verdict`."""
        return True

    @property
    def may_move(self) -> bool:
        """See `Verdict`."""
        return True

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        return "the same on any devices, and over moves"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMoved(Verdict):
    """No moves by choice.

    Attributes:
        differences: What is not as it would be had it not moved, in the order of time.
        problem: Why it could not be moved at all.
    """

    differences: tuple[Difference, ...] = ()
    problem: str = ""

    @property
    def may_widen(self) -> bool:
        """See `Verdict`."""
        return True

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        return f"the same on several devices, but not moved: {_moves(self)}"

    @property
    def advice(self) -> str:
        """See `Verdict`."""
        return "" if self.problem else _KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice(Verdict):
    """No more than one device.

    Attributes:
        differences: What is not as it is on one, in the order of time.
        problem: How the run on several has failed, if it has.
        moves: What became of moves; None if they change nothing.
    """

    differences: tuple[Difference, ...] = ()
    problem: str = ""
    moves: NotMoved | None = None

    @property
    def may_move(self) -> bool:
        """See `Verdict`."""
        return self.moves is None

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        what = str(self.differences[0]) if self.differences else self.problem
        moves = "" if self.moves is None else f"; nor is it moved: {_moves(self.moves)}"
        return f"one device: on several {what}{moves}"

    @property
    def advice(self) -> str:
        """See `Verdict`."""
        reason = usual_reason(self.differences[0]) if self.differences else ""
        return f"{reason} {'' if self.moves is None else self.moves.advice}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRepeatable(Verdict):
    """It gives other results when it is run again on one device.

    Attributes:
        differences: What differs, in the order of time.
    """

    differences: tuple[Difference, ...] = ()

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        return f"not repeatable on one device: run again, {self.differences[0]}"

    @property
    def advice(self) -> str:
        """See `Verdict`."""
        return _SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked(Verdict):
    """Nothing is known.

    Attributes:
        why: A sentence.
        traceback: Of the objective, if it has raised.
    """

    why: str
    traceback: str = ""

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        return f"not checked: {self.why}"

    @property
    def advice(self) -> str:
        """See `Verdict`."""
        return self.traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Verdict):
    """It prepares nothing: there is nothing to check."""

    @property
    def finding(self) -> str:
        """See `Verdict`."""
        return "plain: one device, as it prepares nothing (`trial.prepare`)"


def _moves(verdict: NotMoved) -> str:
    if verdict.problem:
        return verdict.problem
    first = verdict.differences[0]
    if first.kind != "variable":
        return f"after a move {first}, as something begins anew"
    names = (one.name for one in verdict.differences if one.kind == "variable")
    found = list(dict.fromkeys(f"`{_root(name)}`" for name in names))
    return f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''} would begin anew"


def _root(name: str) -> str:
    """The variable that a part belongs to."""
    return name.removeprefix("len(").removesuffix(")").partition("[")[0]


def usual_reason(first: Difference) -> str:
    """What usually makes several devices differ, by what differs first, and when."""
    if first.kind == "gradient" and (first.epoch, first.step) == (0, 1):
        return _LOSS
    if first.kind in ("gradient", "parameter", "optimizer state") or first.kind == "buffer":
        return _KEPT
    if first.kind in ("reported value", "total"):
        return _SUM
    if first.kind == "trial.state":
        return _STATE
    return _APART


_LOSS = (
    "From the first step on: a loss that is no plain mean over the samples (class weights, a mean "
    "over tokens, pairs of samples: see trial.weighted), or gradients that are given by hand."
)
_KEPT = (
    "The first step is the same: something is kept from batch to batch that follows each device's "
    "own samples (a queue, a codebook, a running mean): sum it over the devices (trial.sum, "
    "trial.mean)."
)
_SUM = (
    "The training is the same, but not what is reported: each device has seen its part only. Add "
    "up with trial.sum(...) and divide by the number of samples, or weigh: trial.mean(value, "
    "weight=trial.shard_size)."
)
_STATE = (
    "Each device has filled trial.state from its own samples: sum or average over the devices "
    "(trial.sum, trial.mean) what goes there."
)
_APART = "The devices do not do the same: does the objective depend on trial.rank, or on its data?"
_KEEP = (
    "Keep such things in trial.state, or trial.totals, prepare objects (trial.prepare), make what "
    "modules keep buffers, or use trial.best_value and trial.should_stop(...)."
)
_SEED = (
    "Something is drawn that is not seeded, or depends on time or on threads: without that there "
    "is nothing to compare with."
)
