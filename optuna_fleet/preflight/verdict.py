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
        kind: Of what: one of `records.KINDS`.
        name: As the user wrote it.
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
        size = f" by {self.size:.2g} of the largest" if self.size < float("inf") else ""
        return (
            f"the {self.kind} `{self.name}` differs{size} {where} of mini-epoch {self.epoch + 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has found of a kind of trials, which has these traits; see `Model.traits`.

    Attributes:
        widens: They give the same on several devices.
        moves: They give the same wherever they go on.
        began_anew: What does not, where they go on all the same; "" if that is not known.
    """

    traits: frozenset[str]
    widens: bool
    moves: bool
    began_anew: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What trials like the checked one may do; `print` it, or show it in a notebook.

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
        return isinstance(self, Free | NotMoved)

    @property
    def may_move(self) -> bool:
        """Whether it gives the same wherever it goes on."""
        return isinstance(self, Free) or (isinstance(self, OneDevice) and self.moves is None)

    def finding(self, traits: frozenset[str]) -> Finding:
        """What it says of trials that have these traits."""
        moves = self.moves if isinstance(self, OneDevice) else self
        began_anew = _moves(moves) if isinstance(moves, NotMoved) else ""
        return Finding(
            traits=traits, widens=self.may_widen, moves=self.may_move, began_anew=began_anew
        )

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        finding, advice = told(self)
        of = f" ({params})" if params else ""
        took = f"The check took {self.wall_s:.1f} s ({self.cpu_s:.1f} s of CPU time)."
        lines = [f"Pre-flight check{of}: {finding}", advice, took]
        return "\n  ".join(filter(None, lines))

    def _repr_html_(self) -> str:
        first, *more = str(self).split("\n")
        rest = "".join(f"<br>{html.escape(line.strip())}" for line in more)
        return f"<div><b>{html.escape(first)}</b>{rest}</div>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Verdict):
    """Any devices, any moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMoved(Verdict):
    """No moves by choice.

    Attributes:
        differences: What is not as it would be had it not moved; causes first.
        problem: Why it could not be moved at all.
    """

    differences: tuple[Difference, ...] = ()
    problem: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRepeatable(Verdict):
    """It gives other results when it is run again on one device: these `differences`."""

    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked(Verdict):
    """Nothing is known: `why`; with the `traceback` of an objective that has raised."""

    why: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Verdict):
    """It prepares nothing: there is nothing to check."""


def told(verdict: Verdict) -> tuple[str, str]:
    """What was found, in a few words, and how it is mended, if it has to be."""
    match verdict:
        case NotMoved():
            finding = f"the same on several devices, but not moved: {_moves(verdict)}"
            return finding, "" if verdict.problem else _KEEP
        case OneDevice(differences=found, moves=moves):
            nor = "" if moves is None else f"; nor is it moved: {_moves(moves)}"
            what = str(found[0]) if found else verdict.problem
            advice = [usual_reason(found[0])] if found else []
            advice += [_KEEP] if moves is not None and not moves.problem else []
            return f"one device: on several {what}{nor}", " ".join(advice)
        case NotRepeatable(differences=found):
            return f"not repeatable on one device: run again, {(*found, 'it fails')[0]}", _SEED
        case NotChecked():
            return f"not checked, and so one device: {verdict.why}", verdict.traceback
        case Plain():
            return "plain: one device, as it prepares nothing (`trial.prepare`)", ""
    return "the same on any devices, and over moves", ""


def _moves(verdict: NotMoved) -> str:
    if verdict.problem:
        return verdict.problem
    first = verdict.differences[0]
    if first.kind != "variable":
        return f"after a move {first}, as something begins anew"
    names = (one.name for one in verdict.differences if one.kind == "variable")
    roots = (name.removeprefix("len(").removesuffix(")").partition("[")[0] for name in names)
    found = list(dict.fromkeys(f"`{root}`" for root in roots))
    return f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''} would begin anew"


def usual_reason(first: Difference) -> str:
    """What usually makes several devices differ, by what differs first, and when."""
    if first.kind == "gradient" and (first.epoch, first.step) == (0, 1):
        return _LOSS
    return _REASONS.get(first.kind, _KEPT)


_LOSS = (
    "From the first step on: a loss that is no plain mean over the samples (class weights, a mean "
    "over tokens, pairs of samples: see trial.weighted), or gradients that are given by hand."
)
_KEPT = (
    "The first step is the same: something is kept from batch to batch that follows each device's "
    "own samples (a queue, a codebook, a running mean), or a loss that comes later is no plain "
    "mean over the samples: sum over the devices (trial.sum, trial.mean, trial.weighted)."
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
_REASONS = {"reported value": _SUM, "total": _SUM, "trial.state": _STATE}
_KEEP = (
    "Keep such things in trial.state, or trial.totals, prepare objects (trial.prepare), make what "
    "modules keep buffers, or use trial.best_value and trial.should_stop(...)."
)
_SEED = (
    "Something is drawn that is not seeded, or depends on time or on threads: without that there "
    "is nothing to compare with."
)
