"""ResNet-152 and VGG-19 as chains of layers, and the cluster of HetPipe's section 8.1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torchvision
from torch import Tensor, nn

from optuna_fleet.virtual_workers.partition import Layers, StageDevice

BATCH_SIZE = 32
_FLOAT_BYTES = 4
_WORKSPACE_BYTES = 0.8e9
"""What CUDA, cuDNN and TensorFlow took of each device: an assumption."""

SPEEDS = {"V": 5120 * 1455, "R": 4608 * 1770, "G": 1920 * 1680, "Q": 1792 * 1480}
"""Cores x MHz of Table 1."""
MEMORY_GB = {"V": 12, "R": 24, "G": 6, "Q": 8}
ON_ONE_V = {"ResNet-152": 112.0, "VGG-19": 159.0}
"""Published images/s of a single V (Table 4): the only calibration of speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What may not be cut, for one image."""

    flop: float
    parameters: int
    kept: int
    output: int


def units_of(name: str) -> list[Unit]:
    """The units of a model, measured on torch's meta device."""
    with torch.device("meta"):
        made = (
            torchvision.models.resnet152() if name == "ResNet-152" else torchvision.models.vgg19()
        )
        x = torch.zeros(1, 3, 224, 224)
        units = []
        for module in _resnet(made) if name == "ResNet-152" else _vgg(made):
            x, unit = _measured(module, x)
            units.append(unit)
    return units


def _resnet(model: nn.Module) -> Iterator[nn.Module]:
    yield nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        yield from stage
    yield nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)


def _vgg(model: nn.Module) -> Iterator[nn.Module]:
    """Each convolution or linear layer with what follows it."""
    modules = [*model.features, model.avgpool, nn.Flatten(1), *model.classifier]
    group: list[nn.Module] = []
    for module in modules:
        if isinstance(module, (nn.Conv2d, nn.Linear)) and group:
            yield nn.Sequential(*group)
            group = []
        group.append(module)
    yield nn.Sequential(*group)


def _measured(module: nn.Module, x: Tensor) -> tuple[Tensor, Unit]:
    flop = kept = 0

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal flop, kept
        if isinstance(layer, nn.Conv2d):
            flop += 2 * output.numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.Linear):
            flop += 2 * layer.weight.numel()
        if not getattr(layer, "inplace", False):
            kept += output.numel()

    leaves = [layer for layer in module.modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(note) for layer in leaves]
    output = module(x)
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for p in module.parameters())
    return output, Unit(flop=flop, parameters=parameters, kept=kept, output=output.numel())


def layers_of(name: str) -> Layers:
    """Costs for 32 images; time goes with FLOP, 2 of 3 parts of it in the backward pass."""
    units = units_of(name)
    whole = sum(unit.flop for unit in units)

    def seconds(kind: str, share: float) -> tuple[float, ...]:
        per_s = ON_ONE_V[name] * SPEEDS[kind] / SPEEDS["V"]
        return tuple(share * BATCH_SIZE / per_s * unit.flop / whole for unit in units)

    in_batch = BATCH_SIZE * _FLOAT_BYTES
    return Layers(
        forward_s={kind: seconds(kind, 1 / 3) for kind in SPEEDS},
        backward_s={kind: seconds(kind, 2 / 3) for kind in SPEEDS},
        cut_bytes=tuple(in_batch * float(unit.output) for unit in units),
        parameter_bytes=tuple(_FLOAT_BYTES * float(unit.parameters) for unit in units),
        kept_bytes=tuple(in_batch * float(unit.kept) for unit in units),
    )


def cluster(kinds: str) -> tuple[StageDevice, ...]:
    """A node of 4 devices for each letter of `kinds`."""
    return tuple(
        StageDevice(
            index=4 * node + slot,
            node=node,
            kind=kind,
            memory_bytes=MEMORY_GB[kind] * 1e9 - _WORKSPACE_BYTES,
        )
        for node, kind in enumerate(kinds)
        for slot in range(4)
    )
