"""What an agent is told before it can be told anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.pipeline.spec import PipelineSetup
from optuna_fleet.resources import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """All an agent needs to know to start; travels over its standard input.

    The agent removes `private_folder` in the end: it outlives a driver that is killed. A
    preprocessor that works on one chunk for `stuck_s` seconds is killed.
    """

    node: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    preload: tuple[str, ...]
    devices: tuple[Device, ...]
    threads_per_slot: int
    pipeline: PipelineSetup | None
    private_folder: str | None
    stuck_s: float | None = None
