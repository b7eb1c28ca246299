import pytest
from journals import checked, record, result_of, trial


def test_worst_quantity_is_nearest_its_limit(tmp_path):
    check = checked(("loss", 0.5, 1.0), ("out", 0.03, 0.04), ("padding", 0.0, 0.0), ("dq", 2.0, 9.0))
    records = [record(trial(), check=checked(("loss", 0.1, 1.0))), record(trial(seed=1), check=check)]
    [error] = result_of(tmp_path, records).errors
    assert (error.quantity, error.ratio) == ("out", pytest.approx(0.75))
    assert error.reference == "manual attention, fp32, same weights"


@pytest.mark.parametrize("quantity", [("padding", 1e-9, 0.0), ("dq", None, 0.1)])
def test_error_without_ratio_is_the_worst(tmp_path, quantity):
    failed = record(trial(attention="flex"), outcome="failed_check", check=checked(("dk", 5.0, 1.0), quantity))
    fine = record(trial(), check=checked(("loss", 0.1, 1.0)))
    first, second = result_of(tmp_path, [fine, failed]).errors
    assert (first.configuration.trial.attention, first.quantity, first.ratio) == ("flex", quantity[0], None)
    assert second.ratio == pytest.approx(0.1)


def test_trial_that_was_not_checked_has_no_error(tmp_path):
    assert result_of(tmp_path, [record(trial()), record(trial(seed=1), check={"quantities": []})]).errors == ()
