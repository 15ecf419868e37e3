"""What the layers of a model cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Costs of a chain of L layers, for one minibatch.

    Attributes:
        forward_s: Device type -> seconds of each layer's forward pass.
        backward_s: Device type -> seconds of each layer's backward pass.
        cut_bytes: What crosses a cut behind each layer, whatever layers made it; the gradients
            that come back are as large. That behind the last layer counts for nothing.
        parameter_bytes: Size of each layer's parameters.
        kept_bytes: What each layer keeps between a forward pass and its backward pass.

    Raises:
        ValueError: There are no layers, a list is not of length L, a number is negative or not
            finite, or the device types of the two passes differ.
    """

    forward_s: Mapping[str, tuple[float, ...]]
    backward_s: Mapping[str, tuple[float, ...]]
    cut_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.cut_bytes:
            raise ValueError("The value of `cut_bytes` is empty, but there must be a layer.")
        if self.forward_s.keys() != self.backward_s.keys() or not self.forward_s:
            raise ValueError(
                f"The value of `forward_s` is for {sorted(self.forward_s)}, that of `backward_s` "
                f"for {sorted(self.backward_s)}, but they must be for the same device types."
            )
        for name, numbers in self._named():
            if len(numbers) != len(self):
                raise ValueError(
                    f"The value of `{name}` has {len(numbers)} numbers, but must have "
                    f"{len(self)}, one for each layer."
                )
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"The value of `{name}` is {numbers}, but must be finite, >= 0.")

    def _named(self) -> Iterable[tuple[str, tuple[float, ...]]]:
        for name in ("cut_bytes", "parameter_bytes", "kept_bytes"):
            yield name, getattr(self, name)
        for kind in self.forward_s:
            yield f"forward_s[{kind!r}]", self.forward_s[kind]
            yield f"backward_s[{kind!r}]", self.backward_s[kind]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.cut_bytes)
