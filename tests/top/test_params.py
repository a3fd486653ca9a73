"""Parameters of the notebooks: a bad value is one readable error with its field; nothing is changed silently."""

import pytest
from pydantic import Field, ValidationError

from specnb.errors import InputError
from specnb.params import KSweepParams, Params

GOOD = KSweepParams().model_dump()

BAD = [
    ("ks", [0, 2], "greater than or equal to 1"),
    ("ks", [257], "less than or equal to 256"),
    ("ks", [], "at least 1"),
    ("ks", list(range(1, 66)), "at most 64"),
    ("ks", [2, 4, 2], "2 is listed twice"),
    ("ks", [2.5], "integer"),
    ("ks", ["2"], "integer"),
    ("ks", [True], "integer"),
    ("ks", 4, "list"),
    ("ks", "4,8", "list"),
    ("temperatures", [-0.1], "than or equal to"),
    ("temperatures", [101.0], "than or equal to"),
    ("temperatures", [float("nan")], "finite"),
    ("temperatures", [0.0, 0.7, 0.7], "0.7 is listed twice"),
    ("temperatures", [0, 0.0], "0.0 is listed twice"),
    ("temperatures", [], "at least 1"),
    ("temperatures", ["0.5"], "number"),
    ("categories", [], "at least 1"),
    ("categories", ["code", "code"], "'code' is listed twice"),
    ("categories", "code", "list"),
    ("prompts_per_category", 0, "greater than or equal to 1"),
    ("prompts_per_category", 2.0, "integer"),
    ("max_new_tokens", 1, "greater than or equal to 2"),
    ("max_new_tokens", 100_001, "less than or equal to 100000"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**63, "less than"),
    ("seed", True, "integer"),
    ("target", 7, "string"),
    ("backend", "onnx", "pattern"),
    ("dtype", "int8", "pattern"),
    ("drafter", None, "string"),
    ("rule", "tree", "'token', 'block' or 'typical'"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD, ids=lambda x: str(x)[:20])
def test_a_bad_value_is_one_line_with_field_value_and_reason(field, value, reason):
    with pytest.raises(InputError, match=reason) as caught:
        KSweepParams.checked(**{field: value})
    told = str(caught.value)
    shown = value[0] if isinstance(value, list) and f"{field}.0 = " in told else value
    assert told.startswith(f"parameters of KSweepParams: {field}") and f" = {shown!r}"[:190] in told
    assert "\n" not in told and "pydantic" not in told


def test_the_lossy_rule_does_not_go_with_temperature_zero():
    with pytest.raises(InputError, match="typical needs temperatures above 0"):
        KSweepParams.checked(rule="typical")
    assert KSweepParams.checked(rule="typical", temperatures=[0.7]).rule == "typical"


def test_all_bad_values_are_told_at_once():
    with pytest.raises(InputError, match=r"ks\.0 = 0.*; seed = -1") as caught:
        KSweepParams.checked(ks=[0], seed=-1)
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_huge_value_does_not_flood_the_message():
    with pytest.raises(InputError) as caught:
        KSweepParams.checked(target=["x" * 100] * 1000)
    assert len(str(caught.value)) < 400


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match=r"kss = \[2\]: Extra inputs are not permitted"):
        KSweepParams.checked(kss=[2])


def test_defaults_are_valid_and_whole_numbers_do_for_temperatures():
    assert KSweepParams.checked() == KSweepParams()
    assert KSweepParams.checked(temperatures=[0, 1]).temperatures == [0.0, 1.0]


def test_ks_are_sorted_and_the_rest_stays_in_order():
    made = KSweepParams.checked(ks=[8, 1, 4], temperatures=[0.7, 0.0], categories=["prose", "code"])
    assert (made.ks, made.temperatures, made.categories) == ([1, 4, 8], [0.7, 0.0], ["prose", "code"])


def test_parameters_are_frozen():
    made = KSweepParams()
    with pytest.raises(ValidationError, match="frozen"):
        made.seed = 3


def test_defaults_are_not_shared_between_objects():
    KSweepParams().ks.append(99)
    assert KSweepParams().ks == GOOD["ks"]


def test_they_survive_json():
    made = KSweepParams(ks=[3], temperatures=[1])
    assert KSweepParams.checked(**made.model_dump(mode="json")) == made
    assert KSweepParams.model_validate_json(made.model_dump_json()) == made


# --- from a notebook's cell -----------------------------------------------------------------------------------------


def test_from_cell_takes_the_fields_and_leaves_the_rest():
    around = {"__name__": "__main__", "In": [], "np": object(), "kss": 1}
    assert KSweepParams.from_cell({**around, **GOOD, "ks": [5]}) == KSweepParams(ks=[5])


def test_from_cell_names_every_missing_parameter():
    cell = {name: value for name, value in GOOD.items() if name not in ("rule", "ks")}
    with pytest.raises(InputError, match="the parameters cell does not define ks, rule"):
        KSweepParams.from_cell(cell)


def test_from_cell_checks_values():
    with pytest.raises(InputError, match=r"ks\.0 = 0"):
        KSweepParams.from_cell({**GOOD, "ks": [0]})


def test_a_model_of_its_own_has_the_same_rules():
    class Own(Params):
        n: int = Field(default=1, ge=1)

    assert Own.from_cell({"n": 2, "m": 3}).n == 2
    with pytest.raises(InputError, match="parameters of Own: n = 0"):
        Own.checked(n=0)
