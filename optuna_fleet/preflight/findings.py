"""What checks have found of one objective and its data sets, kept with its checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from optuna_fleet.checkpoints.store import Store
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.preflight.verdict import Finding
from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest

_NAME = "checks.json"
_PACKAGES = ("optuna-fleet", "torch", "numpy")


class Findings:
    """Those of one objective; they count as long as its code, data sets and torch are the same.

    Args:
        of: See `digest`.
        store: Where they are kept; None for in this process only.

    Attributes:
        of: As given.
        store: Likewise.
        all: They; grows.
    """

    def __init__(self, of: str, store: Store | None = None) -> None:
        self.all: list[Finding] = []
        self.of = of
        self.store = store
        self._kept: list[Finding] = []  # for good
        if of and store is not None:
            problems = (OSError, ValueError, KeyError, TypeError)
            with contextlib.suppress(*problems), store.read(_NAME) as file:
                kept = json.load(file)
                self._kept = [_finding(**one) for one in kept["findings"] if kept["of"] == of]
        self.all += self._kept

    def keep(self, found: Finding, *, for_good: bool) -> None:
        """Keep one more, for later processes too if it is `for_good`."""
        self.all.append(found)
        if not for_good or not self.of or self.store is None:
            return
        self._kept.append(found)
        findings = [{**asdict(one), "traits": sorted(one.traits)} for one in self._kept]
        kept = {"of": self.of, "findings": findings}
        with contextlib.suppress(OSError), self.store.write(_NAME) as file:  # or made again
            file.write(json.dumps(kept, indent=1).encode())


def digest(objective: ObjectiveDigest, pipeline: PipelineSpec | None) -> str:
    """What the same findings hold for; "" if that is not known."""
    if not objective.whole:
        return ""
    data = [(one.name, one.num_samples) for one in pipeline.datasets] if pipeline else []
    versions = [_version(name) for name in _PACKAGES]
    return hashlib.sha256(repr((objective.whole, data, versions)).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return ""


def _finding(traits: Sequence[str], **kept: Any) -> Finding:
    return Finding(traits=frozenset(map(str, traits)), **kept)
