"""How a pipeline is to train: what `FleetTrial.pipeline` is given beside the model."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.arguments import check_choice, check_number, check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.virtual_workers.layouts import LAYOUTS

_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """See `FleetTrial.pipeline`.

    Raises:
        FleetConfigError: They are of another kind than there, or contradict each other.
    """

    in_flight: int | None
    flush: bool
    clock_distance: int | None
    virtual_workers: int | None
    layout: str | None
    max_grad_norm: float | None
    memory_bytes: float | None
    min_devices: int | None
    max_devices: int | None

    def __post_init__(self) -> None:
        check_number("in_flight", self.in_flight, least=1, whole=True, optional=True)
        check_that("flush", self.flush, is_a(bool), "be True or False")
        check_number("clock_distance", self.clock_distance, least=0, whole=True, optional=True)
        check_number("virtual_workers", self.virtual_workers, least=1, whole=True, optional=True)
        check_choice("layout", self.layout, LAYOUTS, optional=True)
        check_number("max_grad_norm", self.max_grad_norm, above=0, optional=True)
        check_number("memory_bytes", self.memory_bytes, above=0, optional=True)
        if self.max_grad_norm is not None and not self.is_flushed:
            given = "flush=False" if self.clock_distance is None else "`clock_distance`"
            raise FleetConfigError(
                f"`max_grad_norm` is given with {given}, but the norm of all gradients is only "
                "known when the pipeline is flushed: leave one of them out."
            )
        self._check_workers()

    def _check_workers(self) -> None:
        several = self.virtual_workers or 1
        if self.layout is not None and self.clock_distance is None:
            raise FleetConfigError(
                f"`layout` is {self.layout!r}, but is for virtual workers without flushes: "
                "say with `clock_distance` how many waves they may be apart."
            )
        if self.layout in ("NP", "HD") and self.virtual_workers is not None:
            raise FleetConfigError(
                f"`virtual_workers` is {several}, but in the layout {self.layout!r} their number "
                "follows from the nodes: leave one of them out."
            )
        if several > 1 and not self.is_flushed and self.clock_distance is None:
            raise FleetConfigError(
                f"`virtual_workers` is {several} with flush=False: say with `clock_distance` how "
                "many waves they may be apart."
            )
        if several > self.num_parts and self.is_flushed:
            raise FleetConfigError(
                f"`virtual_workers` is {several}, but `in_flight` is {self.num_parts}: with "
                "flushes they share the parts of a batch, so it must not be more."
            )

    @property
    def is_flushed(self) -> bool:
        """Whether all gradients of a batch are there before the next one begins."""
        return self.flush and self.clock_distance is None

    @property
    def num_parts(self) -> int:
        """Parts of a batch, with flushes: the same on any devices, as BatchNorm sees parts."""
        return self.in_flight or _PARTS

    @property
    def most_in_flight(self) -> int | None:
        """Minibatches in flight; None for as many as there is memory for, and as help."""
        return self.num_parts if self.clock_distance is None else self.in_flight

    @property
    def may_replicate(self) -> bool:
        """Whether each device may have the whole model, if that is expected to be faster."""
        return self.is_flushed and self.virtual_workers is None

    @property
    def most_workers(self) -> int | None:
        """Virtual workers at most; None for as many as are fastest."""
        if self.clock_distance is None:
            return self.virtual_workers or 1
        return self.virtual_workers
