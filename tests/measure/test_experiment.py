"""What every experiment does alike."""

import pytest

from specnb.errors import InputError
from specnb.measure import experiment


def test_a_record_that_cannot_be_saved_does_not_hide_the_error_that_ended_the_run(monkeypatch):
    def full(record):
        raise InputError(f"cannot write {record}")

    monkeypatch.setattr(experiment, "save", full)
    with pytest.raises(ZeroDivisionError) as caught, experiment.saving_failures([1], lambda error: "results/x"):
        raise ZeroDivisionError
    assert "results/x" in caught.value.__notes__[0]
