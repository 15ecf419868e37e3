"""How the files of checkpoints are named. No two runs ever write under one name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
