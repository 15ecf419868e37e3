"""Why something of a loss is not followed."""


class CannotFollowError(Exception):
    """It can't be told what a part of the batch would give."""


class MixedError(CannotFollowError):
    """Samples are made of several samples of the batch."""


class TooLargeError(CannotFollowError):
    """It would take too much memory.

    Attributes:
        num_samples: As many could be followed; 0 if not even two.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__("too large")
        self.num_samples = num_samples


class CannotSplitError(CannotFollowError):
    """What works on the whole batch fails on a part of it."""
