"""What the study is told: calls made inside objectives, how trials ended."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.exceptions import (
    FleetError,
    ProtocolError,
    RetryableError,
    StorageLostError,
    TrialError,
    is_out_of_memory,
    shown,
)
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.patience import Patience, is_gone
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.records import Records
from optuna_fleet.wire.calls import Call
from optuna_fleet.wire.packing import is_primitive, unpack

Callback: TypeAlias = Callable[[optuna.Study, FrozenTrial], None]

REASON_KEY = "optuna_fleet:reason"


class Ledger:
    """Writes to one study in the name of the trials asked for by `proposals`.

    Attributes:
        began: When the call began, seconds since the epoch.
        ended: How many trials the study has in each state, by its name in lower case: of those
            that were told, whatever was raised after that.
    """

    def __init__(
        self,
        study: optuna.Study,
        proposals: Proposals,
        patiently: Patience,
        *,
        catch: tuple[type[Exception], ...],
        callbacks: Iterable[Callback] | None,
        gc_after_trial: bool,
        progress_bar: compat.ProgressBar,
    ) -> None:
        self.study = study
        self.began = round(time.time(), 3)
        self.patiently = patiently
        self.records = Records(study, self.began, patiently)
        self.ended: Counter[str] = Counter()
        self._proposals = proposals
        self._catch = catch
        self._callbacks = list(callbacks or ())
        self._gc_after_trial = gc_after_trial
        self._progress_bar = progress_bar
        self._repeats = _Repeats()

    def carry_out(self, number: int, call: Call) -> Any:
        """Make a call of trial `number` on the real trial, study or storage and return its result.

        Raises:
            Exception: Whatever Optuna raises.
        """
        trial = self._proposals[number]
        storage = compat.storage_of(self.study)
        targets: dict[str, Any] = {"trial": trial, "study": self.study, "storage": storage}
        if call.target not in targets:
            raise ProtocolError(f"There is nothing called {call.target!r} to call.")
        if (call.target, call.name) == ("study", "ask"):
            raise TrialError(
                "`ask` was called on the study in an objective, but a trial can't leave the "
                "driver: ask in a callback, or optimize another study."
            )
        if call.is_suggestion or call.target != "trial":
            self._proposals.note_news()
        args, kwargs = unpack(call.arguments)

        def carried_out() -> Any:
            compat.forget_cached_trials(self.study)
            attribute = getattr(targets[call.target], call.name)
            return attribute if call.is_read else attribute(*args, **kwargs)

        return self.patiently(carried_out)

    def unsampled(self, number: int, call: Call) -> optuna.Trial | None:
        """The trial, if this call makes the sampler propose its parameters."""
        if not call.is_suggestion or number not in self._proposals.unfinished():
            return None  # to a late call, `carry_out` will say so
        trial, (args, kwargs) = self._proposals[number], unpack(call.arguments)
        name = str(args[0] if args else kwargs.get("name", ""))
        is_one = self.patiently(lambda: compat.is_unsampled(self.study, trial, name))
        return trial if is_one else None

    def report(self, number: int, value: float, step: int) -> None:
        """Store what a trial reports, but for what it reports again since it is run again.

        Raises:
            Exception: Whatever Optuna raises.
        """
        if not self._repeats.has_reported(number, step):
            self.patiently(lambda: self._proposals[number].report(value, step))

    def should_prune(self, number: int, last_step: int | None) -> bool:
        """Ask the pruner, which judges the last report that the study has.

        Where the trial was before, it gets the same answer.

        Raises:
            Exception: Whatever Optuna raises.
        """
        if (known := self._repeats.verdict(number, last_step)) is not None:
            return known
        compat.forget_cached_trials(self.study)
        is_pruned = self.patiently(self._proposals[number].should_prune)
        self._repeats.judged(number, last_step, is_pruned=is_pruned)
        return is_pruned

    def note_restart(self, number: int) -> None:
        """The trial is run again from an earlier epoch: it will report some steps twice."""
        self._repeats.begin(number, self.frozen(number).intermediate_values)

    def frozen(self, number: int) -> FrozenTrial:
        """The trial as the study knows it now."""
        return self._now(self._proposals[number])

    def _now(self, trial: optuna.Trial) -> FrozenTrial:
        return self.patiently(lambda: compat.frozen(self.study, trial))

    def chosen(self, number: int) -> dict[str, Any]:
        """All parameters that the trial has so far; of choices that are objects, the positions."""
        trial = self.frozen(number)
        return {
            name: value
            if is_primitive(value)
            else int(trial.distributions[name].to_internal_repr(value))
            for name, value in trial.params.items()
        }

    def reported_values(self, number: int, last_step: int | None) -> list[float]:
        """The trial's intermediate values, in order of step, that led to where it is now."""
        ahead = self._repeats.ahead(number, last_step)
        values = sorted(self.frozen(number).intermediate_values.items())
        return [value for step, value in values if step not in ahead]

    def show_under_way(self, num_trials: int, num_devices: int) -> None:
        """Show in the progress bar what is at work: it may be long until a trial ends."""
        text = f"{num_trials} trials on {num_devices} devices" if num_trials else ""
        compat.show_beside_bar(self._progress_bar, text)

    def settle(
        self, number: int, value: float | Sequence[float] | None, error: BaseException | None
    ) -> None:
        """Tell the study how the trial ended, as `Study.optimize` does, then run the callbacks.

        Raises:
            BaseException: `error`, unless `catch` covers it; what a sampler or callback raises.
        """
        trial = self._proposals[number]
        try:
            state = self._tell(trial, value, error)
        except UpdateFinishedTrialError:
            state, error = self._now(trial).state, None
            self.ended[state.name.lower()] += 1
            compat.logger.warning(f"Trial {number} stays {state.name}: it was ended elsewhere.")
        except Exception:
            self._let_go(number)
            raise  # after Ctrl-C, which may have come before it was told, `abandon` is due
        self._let_go(number)
        if state is TrialState.FAIL and error is not None and not isinstance(error, self._catch):
            raise error
        finished = self._now(trial)
        for callback in self._callbacks:
            callback(self.study, copy.deepcopy(finished))
        try:
            self._progress_bar.update(self._proposals.elapsed_s, self.study)
        except Exception as problem:
            if not is_gone(problem):  # else the bar is one behind
                raise

    def _let_go(self, number: int) -> None:
        self._proposals.release(number)
        self._repeats.forget(number)
        if self._gc_after_trial:
            gc.collect()

    def abandon(self, numbers: Sequence[int], error: BaseException) -> None:
        """Fail trials cut short because the whole call ends with `error`; raises no Exception.

        If it is the fleet that failed, or somebody interrupted it, they stay RUNNING where a later
        call can go on with them. One line tells of all: `error` is about to be shown anyway.
        """
        is_resumable = isinstance(error, RetryableError) or not isinstance(error, Exception)
        stay = is_resumable and self._proposals.are_claimed
        told = [str(number) for number in numbers if self._is_abandoned(number, error, stay)]
        if told:
            what = f"failed: {shown(error)}"
            if stay:
                what = (
                    "stay RUNNING: the same call, made again, goes on with them, from their "
                    "checkpoints if there are any yet"
                )
            compat.logger.warning(f"Trials under way ({', '.join(told)}) {what}.")

    def _is_abandoned(self, number: int, error: BaseException, stays: bool) -> bool:
        try:
            if not stays:
                self._tell(self._proposals[number], None, error, is_logged=False)
            return True
        except (StorageLostError, UpdateFinishedTrialError):  # not to be told of here
            return False
        except Exception:
            compat.logger.warning(f"Trial {number} could not be told as failed.", exc_info=True)
            return False
        finally:
            self._proposals.release(number)

    def _tell(
        self,
        trial: optuna.Trial,
        value: float | Sequence[float] | None,
        error: BaseException | None,
        *,
        is_logged: bool = True,
    ) -> TrialState:
        told: TrialState | None = None
        if error is not None:
            is_pruned = isinstance(error, optuna.TrialPruned)
            told, value = (TrialState.PRUNED if is_pruned else TrialState.FAIL), None
            if isinstance(error, FleetError) or is_out_of_memory(error):
                reason = f"{type(error).__name__}: {error}"
                record = self.study, trial, REASON_KEY, reason
                self.patiently(lambda: compat.set_trial_record(*record))
        was_stopped = compat.is_stopped(self.study)
        raised: Exception | None = None
        tries = itertools.count()

        def tell() -> tuple[TrialState, list[float] | None, str | None]:
            return compat.tell(self.study, trial, value, told, is_repeated=next(tries) > 0)

        try:
            state, values, problem = self.patiently(tell)
        except (StorageLostError, UpdateFinishedTrialError):
            raise
        except Exception as of_sampler:  # its `after_trial`; the state is stored all the same
            finished = self._now(trial)
            state, values, problem, raised = finished.state, finished.values, None, of_sampler
        self.ended[state.name.lower()] += 1
        if is_logged:
            self._log(trial, state, values, value, error, problem)
        # A grid looks for the cell of a trial from the queue, which has none.
        if raised is not None and (type(raised), *raised.args) != (KeyError, "grid_id"):
            raise raised
        if compat.is_stopped(self.study) and not was_stopped:
            self._proposals.reconsider_stop()
        return state

    def _log(
        self,
        trial: optuna.Trial,
        state: TrialState,
        values: list[float] | None,
        value: Any,
        error: BaseException | None,
        problem: str | None,
    ) -> None:
        if state is TrialState.COMPLETE and values is not None:
            self.patiently(lambda: compat.log_completed(self.study, trial, values))
        elif state is TrialState.PRUNED:
            compat.logger.info(f"Trial {trial.number} pruned. {error}")
        else:
            compat.log_failed(trial, problem if error is None else shown(error), value, error)


class _Repeats:
    """What trials that are run again had reported before, and what the pruner had said of that.

    The study then knows reports that the trial has yet to come to again. Nothing may be decided by
    these, or it would end where it had gone on. `last_step` is the last that led to where it is.
    """

    def __init__(self) -> None:
        self._reported: dict[int, frozenset[int]] = {}
        self._condemned: dict[int, set[int]] = {}

    def begin(self, number: int, steps: Iterable[int]) -> None:
        """A trial is run again that has reported these steps."""
        self._reported[number] = frozenset(steps)

    def forget(self, number: int) -> None:
        """The trial is done."""
        self._reported.pop(number, None)
        self._condemned.pop(number, None)

    def has_reported(self, number: int, step: int) -> bool:
        """Whether that is a report made again."""
        return step in self._reported.get(number, ())

    def ahead(self, number: int, last_step: int | None) -> set[int]:
        """The steps that the trial had reported and has not come to again."""
        reported = self._reported.get(number, ())
        return {step for step in reported if last_step is None or step > last_step}

    def judged(self, number: int, last_step: int | None, *, is_pruned: bool) -> None:
        """The pruner has judged the trial there; it may go on all the same."""
        if is_pruned and last_step is not None:
            self._condemned.setdefault(number, set()).add(last_step)

    def verdict(self, number: int, last_step: int | None) -> bool | None:
        """What the pruner said when the trial was there before; None if it is to be asked.

        `SuccessiveHalvingPruner` says only once that a trial is to end. What it said to a driver
        that is dead is not known.
        """
        reported = self._reported.get(number, frozenset())
        if last_step in self._condemned.get(number, set()) & reported:
            return True
        return False if self.ahead(number, last_step) else None
