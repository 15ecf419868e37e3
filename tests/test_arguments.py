"""Numbers that a user gives."""

import numpy as np
import pytest

from optuna_fleet import FleetConfigError, FleetExecutor
from optuna_fleet.arguments import check_number


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"alpha": "0.5"}, "`alpha` is '0.5', but must be a number > 0 and <= 1."),
        ({"alpha": 1.5}, "`alpha` is 1.5, but must be a number > 0 and <= 1."),
        ({"max_restarts": 1.5}, "`max_restarts` is 1.5, but must be a whole number >= 0."),
        ({"max_restarts": None}, "`max_restarts` is None, but must be a whole number >= 0."),
        ({"trial_timeout_s": "3"}, "`trial_timeout_s` is '3', but must be a number > 0, or None."),
        ({"storage_patience_s": float("nan")}, "is nan, but must be a number >= 0."),
        ({"keep_checkpoints": True}, "is True, but must be a whole number >= 0."),
        ({"seed": -1}, "`seed` is -1, but must be a whole number >= 0."),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(arguments, complaint) -> None:
    with pytest.raises(FleetConfigError) as caught:
        FleetExecutor(devices=1, device_type="cpu", **arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("value", [3, np.int64(3), 3.0, np.float32(3), float("inf")])
def test_numbers_of_all_kinds_will_do(value) -> None:
    check_number("x", value, least=3)


@pytest.mark.parametrize("value", ["3", np.zeros(2), [3], float("nan"), 3 + 0j, True])
def test_what_is_no_number_is_refused_in_words(value) -> None:
    with pytest.raises(FleetConfigError, match=r"`x` is .*, but must be a number >= 0"):
        check_number("x", value, least=0)


def test_none_will_do_where_it_is_optional() -> None:
    check_number("x", None, above=0, optional=True)
