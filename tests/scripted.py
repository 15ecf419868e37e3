"""Functions and classes that no other process can import: those of a user's script."""

from typing import Any


def script(code: str, **given: Any) -> dict[str, Any]:
    """The global variables of train.py with this code."""
    variables = {"__name__": "__main__", **given}
    exec(compile(code, "/somewhere/train.py", "exec"), variables)
    return variables
