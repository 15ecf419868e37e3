"""What is known of torchvision's transforms: which draw nothing, which work on batches too.

It is never imported here: where nobody imported it, no transform can be one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Step = Callable[..., Any]

# The result depends on nothing but the input. Exact classes: a subclass may do what it likes.
_DETERMINISTIC = frozenset(
    {
        "CenterCrop",
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "ConvertBoundingBoxFormat",
        "ConvertImageDtype",
        "FiveCrop",
        "Grayscale",
        "Identity",
        "LinearTransformation",
        "Normalize",
        "PILToTensor",
        "Pad",
        "RGB",
        "Resize",
        "SanitizeBoundingBoxes",
        "SanitizeKeyPoints",
        "SetClampingMode",
        "TenCrop",
        "ToDtype",
        "ToImage",
        "ToPILImage",
        "ToPureTensor",
        "ToTensor",
        "UniformTemporalSubsample",
    }
)
_ELEMENTWISE = frozenset({"ConvertImageDtype", "Identity", "Normalize", "ToDtype", "ToPureTensor"})
_CONTAINERS = frozenset({"RandomApply", "RandomChoice", "RandomOrder"})


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps one after another, as ``Compose`` calls them; none at all is allowed too."""

    steps: tuple[Step, ...]

    def __call__(self, *inputs: Any) -> Any:
        """Returns what the last step gives; a tuple, if several values were given."""
        joint = len(inputs) > 1
        for step in self.steps:
            output = step(*inputs)
            inputs = output if joint else (output,)
        return inputs if joint else inputs[0]


@dataclass(frozen=True, slots=True)
class ToBytes:
    """First half of ``ToTensor``: a PIL image's bytes as a tensor.

    ``ToTensor`` in two halves lets an image travel as bytes and become float at the end.
    """

    whole: Step

    def __call__(self, *inputs: Any) -> Any:
        """Returns the bytes of a picture; of anything else, what ``ToTensor`` makes of it."""
        from optuna_fleet.pipeline.chunks.columns import is_picture, without_images

        if len(inputs) == 1 and is_picture(inputs[0]) and inputs[0].mode in ("L", "RGB"):
            return without_images(inputs[0])
        return self.whole(*inputs)


@dataclass(frozen=True, slots=True)
class ToUnit:
    """Second half of ``ToTensor``: bytes become floats from 0 to 1."""

    def __call__(self, *inputs: Any) -> Any:
        """Returns the floats of a tensor of bytes; anything else is finished already."""
        import torch

        if len(inputs) > 1:
            return inputs
        (value,) = inputs
        if isinstance(value, torch.Tensor) and value.dtype is torch.uint8:
            floats = value.to(torch.get_default_dtype())
            return floats.div(floats.new_full((), 255))  # CUDA multiplies by 1 / 255 for a number
        return value


def steps_of(transform: Any) -> tuple[Step, ...] | None:
    """Returns the steps of a transform of torchvision's, or None if it is none of them."""
    if _name(transform) is None:
        return None
    return tuple(_flat([transform]))


def is_deterministic(step: Step) -> bool:
    """Whether the step draws no random numbers, calls no code of the user's, writes nowhere."""
    if isinstance(step, (ToBytes, ToUnit)):
        return True
    return _name(step) in _DETERMINISTIC and leaves_input(step)


def is_elementwise(step: Step) -> bool:
    """Whether the step gives the same for a batch as for its images one by one."""
    if isinstance(step, ToUnit):
        return True
    by_type = isinstance(getattr(step, "dtype", None), dict)
    return _name(step) in _ELEMENTWISE and leaves_input(step) and not by_type


def leaves_input(step: Step) -> bool:
    """Whether the step is torchvision's own and leaves its input alone."""
    if isinstance(step, (ToBytes, ToUnit)):
        return True
    name = _name(step)
    if name in _CONTAINERS:
        return all(map(leaves_input, _flat(getattr(step, "transforms", ()))))
    if name is None or name == "Lambda" or getattr(step, "inplace", False):
        return False
    return not callable(getattr(step, "labels_getter", None))


def is_standard(transforms: Any) -> bool:
    """Whether it is the pair (transform, target_transform) of a torchvision data set."""
    module = sys.modules.get("torchvision.datasets.vision")
    return module is not None and type(transforms) is module.StandardTransform


def _flat(steps: Iterable[Any]) -> Iterable[Step]:
    for step in steps:
        name = _name(step)
        if name in ("Compose", "Sequential"):
            yield from _flat(step if name == "Sequential" else step.transforms)
        elif name == "ToTensor":
            yield from (ToBytes(step), ToUnit())
        else:
            yield step


def _name(step: Any) -> str | None:
    """The name of the class, if it is torchvision's own or ours (or an ``nn.Sequential``)."""
    kind = type(step)
    nn = sys.modules.get("torch.nn")
    if nn is not None and kind is nn.Sequential:
        return "Sequential"
    modules: list[ModuleType | None] = [
        sys.modules.get(f"torchvision.transforms{name}") for name in (".v2", "", ".v2._misc")
    ]
    modules.append(sys.modules.get("optuna_fleet.pipeline.crops"))
    name = kind.__name__
    return name if any(vars(m).get(name) is kind for m in modules if m is not None) else None
