"""States of compiled modules are under the names that the modules have uncompiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optuna_fleet.trainer.states import load_state, state_of


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def plain() -> nn.Module:
    return nn.ModuleDict({"body": layers(), "head": nn.Linear(2, 1)})


def whole() -> nn.Module:
    return compiled(plain())


def part() -> nn.Module:
    return nn.ModuleDict({"body": compiled(layers()), "head": nn.Linear(2, 1)})


def both() -> nn.Module:
    return compiled(part())


@pytest.mark.parametrize("source", [plain, whole, part, both])
@pytest.mark.parametrize("target", [plain, whole, part, both])
def test_any_loads_any(source: Callable[[], nn.Module], target: Callable[[], nn.Module]) -> None:
    state = state_of(source())
    assert list(state) == list(plain().state_dict())
    assert state._metadata == plain().state_dict()._metadata  # type: ignore[attr-defined]
    loaded = target()
    load_state(loaded, state)
    assert all(torch.equal(state_of(loaded)[key], value) for key, value in state.items())


def test_it_stays_compiled() -> None:
    module = both()
    names = [name for name, _ in module.named_modules()]
    state_of(module)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        load_state(module, {"head.weight": torch.ones(1, 2)})
    assert [name for name, _ in module.named_modules()] == names
    assert "_orig_mod.body._orig_mod.0" in names
