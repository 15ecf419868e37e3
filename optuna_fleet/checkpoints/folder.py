"""What a study keeps in a store: what it is called there, and which call wrote it last.

No two runs ever write under one name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from optuna_fleet.checkpoints.store import Store
from optuna_fleet.exceptions import FleetConfigError

_CALL = "call.json"
_NUMBER = r"\d{1,12}"
_FILE = re.compile(
    rf"trial-({_NUMBER})"
    rf"(?:(?:\.({_NUMBER}(?:-{_NUMBER})+))?\.([0-9a-f]{{8}}-{_NUMBER}))?"
    r"(?:\.(best|final))?\.pt",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """As ``trial-7.1-5.3f9a1c02-12.pt``; what a trial leaves in the end is ``trial-7.final.pt``.

    Attributes:
        position: Loop, epoch and perhaps step to go on with; empty for a final one. Of a best one,
            that of the first checkpoint that tells of it.
        run: Which run wrote it: no other run of any driver has this name. Empty for a final one
            that the driver has taken for the trial's.
        kind: "best": the trial at its best so far; "final": what it leaves when it is done; or "".
    """

    trial: int
    position: tuple[int, ...] = ()
    run: str = ""
    kind: str = ""

    @classmethod
    def parse(cls, text: str) -> FileName | None:
        """The name if it is one of ours: a plain file name, which leads nowhere else."""
        match = _FILE.fullmatch(text)
        if match is None or (match[4] == "final") is not (match[2] is None):
            return None
        position = tuple(map(int, match[2].split("-"))) if match[2] else ()
        return cls(trial=int(match[1]), position=position, run=match[3] or "", kind=match[4] or "")

    def __str__(self) -> str:
        parts = (f"trial-{self.trial}", "-".join(map(str, self.position)), self.run, self.kind)
        return ".".join([part for part in (*parts, "pt") if part])


def trial_of(text: str) -> int | None:
    """Number of the trial that a checkpoint is of, or what is left of one that was cut short."""
    name = FileName.parse(text[1:].rpartition(".")[0] if text.startswith(".") else text)
    return None if name is None else name.trial


def resumable(found: Iterable[FileName], newest: FileName) -> list[FileName]:
    """What a trial can go on from: `newest`, and those that got no further, the best first."""
    before = {n for n in found if n.kind == "" and n.trial == newest.trial} - {newest}
    return [newest, *newest_first(n for n in before if n.position <= newest.position)]


def newest_first(names: Iterable[FileName]) -> list[FileName]:
    """In the order of how far their trials were."""
    return sorted(names, key=lambda name: (name.position, name.run), reverse=True)


def superfluous(found: Iterable[FileName], newest: FileName) -> set[FileName]:
    """What of a trial is not needed now that `newest` is its checkpoint.

    Needed are that and the one before it, should it be damaged; of each the best until then; and
    what its run has written since, or a later run, which went on with it before it was told of.
    What other runs wrote is void: they are over.
    """
    of_trial = (name for name in found if name.trial == newest.trial and name.run)
    mine = {name for name in of_trial if not _is_later(name.run, newest.run)}
    kept = set(resumable(mine, newest)[:2])
    bests = newest_first(name for name in mine if name.kind == "best")
    for one in tuple(kept):
        kept.update([best for best in bests if best.position <= one.position][:1])
    return {
        name
        for name in mine - kept
        if name.run != newest.run or () < name.position <= newest.position
    }


def _is_later(run: str, other: str) -> bool:
    """Whether the same driver began it after the other one."""
    (driver, number), (of, than) = (name.split("-") for name in (run, other))
    return driver == of and int(number) > int(than)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One `optimize` call, as its folder knows it."""

    study: str
    id: str  # marks the trials that belong to it
    n_trials: int | None  # as given
    timeout: float | None
    has_ended: bool = False  # well or not; it has not where its driver died
    was_interrupted: bool = False  # by a Ctrl-C, or the script's own end
    code: str = ""  # digest of the objective's code, if that is known
    whole: str = ""  # likewise, of the values that it uses too


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The part of a checkpoint folder that is one study's."""

    root: Path
    study_name: str

    @property
    def path(self) -> Path:
        """Where it is; a digest tells apart names that were cut short."""
        digest = hashlib.sha256(self.study_name.encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", self.study_name)[:60]
        return self.root / f"{readable}-{digest}"

    @property
    def store(self) -> Store:
        """What is kept there, by name."""
        return Store(self.path)

    def at(self, name: FileName) -> Path:
        """Where the checkpoint of this name is."""
        return self.path / str(name)

    def final(self, number: int) -> Path:
        """Where the checkpoint is that a trial leaves when it is done."""
        return self.at(FileName(trial=number, kind="final"))

    def finals(self) -> set[int]:
        """Numbers of the trials that have left one."""
        return {name.trial for name in self._found() if not name.run}

    def final_bytes(self, number: int) -> int:
        """Size of the checkpoint that a trial has left; 0 if it has none."""
        try:
            return self.store.size(self.final(number).name)
        except OSError:
            return 0

    def unfinished(self) -> dict[int, str]:
        """Where the newest checkpoints are, good or bad, of trials that are not done."""
        names = [name for name in self._found() if not name.kind]
        return {name.trial: str(self.at(name)) for name in reversed(newest_first(names))}

    def resumable(self, location: str) -> tuple[str, ...]:
        """What a trial whose checkpoint is there can go on from: that, and those before it."""
        newest = FileName.parse(Path(location).name)
        before = [] if newest is None else resumable(self._found(), newest)[1:]
        return (location, *(str(self.at(name)) for name in before))

    def bests(self, number: int) -> tuple[str, ...]:
        """Where a trial that is not done has kept its state at its best, the newest first."""
        bests = [n for n in self._found() if n.trial == number and n.kind == "best"]
        return tuple(str(self.at(name)) for name in newest_first(bests))

    def saved(self, location: str) -> None:
        """A trial's checkpoint is there now: remove what it does not need beside it."""
        if (newest := FileName.parse(Path(location).name)) is not None:
            self._remove(map(str, superfluous(self._found(), newest)))

    def left(self, number: int, run: str) -> bool:
        """The last run of a trial was this one: the trial leaves what it has left, if anything."""
        try:
            left = FileName(trial=number, run=run, kind="final")
            self.store.rename(str(left), self.final(number).name)
        except OSError:
            return False
        return True

    def drop_unfinished(self, number: int) -> None:
        """Remove all of a trial but its final checkpoint."""
        final = self.final(number).name
        self._remove(n for n in self._names() if trial_of(n) == number and n != final)

    def drop(self, number: int) -> None:
        """Remove all of a trial."""
        self._remove(name for name in self._names() if trial_of(name) == number)

    def drop_all_but(self, *, unfinished: set[int], finals: set[int]) -> None:
        """Remove all checkpoints but those of these trials, and what writing them left."""
        found = {trial_of(name) for name in self._names()}
        for number in found - unfinished:
            if number is not None:
                self.drop_unfinished(number)
        self._remove(self.final(number).name for number in self.finals() - finals)
        self._remove(name for name in self._names() if name.startswith(f".{_CALL}."))

    def last_call(self) -> CallRecord | None:
        """The last call that used this folder."""
        try:
            with self.store.read(_CALL) as file:
                return CallRecord(**json.load(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise FleetConfigError(
                f"The record of the last call, {self.path / _CALL}, can't be read ({error}): "
                "remove it to begin a new call. Trials that a dead driver left RUNNING then stay "
                "so."
            ) from error

    def record_call(self, call: CallRecord) -> None:
        """Replace the record of the last call."""
        with self.store.write(_CALL) as file:
            file.write(json.dumps(asdict(call)).encode())

    def _found(self) -> list[FileName]:
        return [name for text in self._names() if (name := FileName.parse(text)) is not None]

    def _names(self) -> list[str]:
        try:
            return self.store.list()
        except OSError:
            return []

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            # On a disk that has become read-only it stays, and is found by the next call.
            with contextlib.suppress(OSError):
                self.store.remove(name)
