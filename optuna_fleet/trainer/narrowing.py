"""Tells the driver, and the user, that a trial can't train on so many devices."""

from __future__ import annotations

from optuna_fleet.events import WidthLimited
from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.messages import Remark


def stay_alone(session: Session, why: str) -> None:
    """The trial, which is on one device, is never to have more."""
    session.send(WidthLimited(run_id=session.run.run_id, max_devices=1))
    session.warn(why)


def go_on_with_fewer(session: Session, why: str, *, min_devices: int, max_devices: int) -> None:
    """A step can't be done on so many devices: the run ends, the trial goes on.

    Args:
        session: This rank's calls.
        why: A sentence for the user.
        min_devices: The fewest that the trial says it can train on.
        max_devices: The most on which it could.

    Raises:
        TrialError: The trial must not have so few.
    """
    run = session.run
    devices = "one device" if max_devices == 1 else f"{max_devices} devices at most"
    if max_devices < min_devices:
        raise TrialError(
            f"{why} It could go on on {devices}, but its `min_devices` is {min_devices}."
        )
    session.send(WidthLimited(run_id=run.run_id, max_devices=max_devices))
    remark = Remark(
        run_id=run.run_id,
        keys=(f"trial {run.number} is too wide",),
        text=f"{why} The trial goes on from its last checkpoint, on {devices}.",
    )
    session.send(remark)  # whichever rank finds it
