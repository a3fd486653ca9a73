"""Parameters of notebooks: invalid values raise one readable error; none is changed silently."""

import pytest

from specnb import params
from specnb.errors import InputError
from specnb.params import KSweepParams, NotebookParams

GOOD = KSweepParams().model_dump()
CLASSES = NotebookParams.__subclasses__()


@pytest.fixture(autouse=True)
def _no_budget_from_outside(monkeypatch):
    monkeypatch.delenv(params.BUDGET, raising=False)


def test_an_invalid_value_is_one_short_line_with_field_and_value():
    for field, value, bad in (
        ("ks", [0, 2], "0 = 0"),
        ("ks", [2, 4, 2], "2 is listed twice"),
        ("ks", [2.5], "0 = 2.5"),
        ("ks", [True], "0 = True"),
        ("temperatures", [-0.1], "0 = -0.1"),
        ("temperatures", [float("nan")], "0 = nan"),
        ("max_new_tokens", 1, "= 1:"),
        ("seed", 2**63, str(2**63)),
        ("backend", "onnx", "'onnx'"),
        ("rule", "typical", "temperatures above 0"),
        ("kss", [2], "kss = [2]"),
        ("target", ["x" * 100] * 1000, "xxx"),
    ):
        with pytest.raises(InputError, match=field) as caught:
            KSweepParams.from_cell(
                GOOD | {field: value}
            ) if field in GOOD else KSweepParams.checked(**{field: value})
        assert (
            bad in str(caught.value)
            and "\n" not in str(caught.value)
            and len(str(caught.value)) < 600
        )


def test_a_prompt_file_is_validated_first_and_provides_the_categories_unless_they_are_set(
    tmp_path, monkeypatch
):
    lines = [f'{{"id": "{c}", "category": "{c}", "text": "x"}}\n' for c in ("qa", "rag")]
    for name, end in {"mine.jsonl": "", "bad.jsonl": "{"}.items():
        (tmp_path / name).write_text("".join([*lines, end]))
    monkeypatch.chdir(tmp_path)
    values = KSweepParams.checked(prompts="mine.jsonl")
    assert (values.prompts, values.categories) == (str(tmp_path / "mine.jsonl"), ["qa", "rag"])
    assert params.ExplorerParams.checked(prompts="mine.jsonl", contents=["rag"]).contents == ["rag"]
    assert KSweepParams.checked(categories="prose,code").categories == ["prose", "code"]
    for bad, given in {
        "bad.jsonl:3": {"prompts": "bad.jsonl"},
        "none.jsonl": {"prompts": "none.jsonl"},
        "'poem'": {"categories": ["poem"]},
        "'code'": {"prompts": "mine.jsonl", "categories": "code"},
    }.items():
        with pytest.raises(InputError, match=bad):
            KSweepParams.checked(**given)


def test_from_cell_uses_the_fields_ignores_other_names_and_lists_every_missing_field():
    cell = {"__name__": "__main__", "In": [], **GOOD, "ks": [8, 1, 4], "temperatures": [1, 0]}
    # sorted; in order, as floats
    assert KSweepParams.from_cell(cell) == KSweepParams(ks=[1, 4, 8], temperatures=[1.0, 0.0])
    for name in (*KSweepParams.sizes, "budget"):
        del cell[name]
    assert KSweepParams.from_cell(cell | {"temperatures": [0.0, 0.7]}) == KSweepParams()
    for name in ("rule", "target"):
        del cell[name]
    with pytest.raises(InputError, match="target, rule"):
        KSweepParams.from_cell(cell)


@pytest.mark.parametrize("kind", CLASSES)
def test_sizes_that_are_not_set_follow_the_budget(kind: type[NotebookParams]):
    normal = kind().model_dump()
    none = dict.fromkeys(kind.sizes)
    for budget in ("quick", "full"):
        given = normal | {"budget": budget}
        sizes = {name: size[budget] for name, size in kind.sizes.items()}
        assert kind.checked(budget=budget, **none) == kind.checked(**given | sizes)
        assert kind.checked(**given).model_dump() == given
    assert kind.checked(**none) == kind()


def test_the_environments_budget_overrides_the_cells(monkeypatch):
    cell = GOOD | dict.fromkeys(KSweepParams.sizes) | {"budget": "quick"}
    for budget in ("", "full"):
        monkeypatch.setenv(params.BUDGET, budget)
        assert KSweepParams.from_cell(cell) == KSweepParams.checked(budget=budget or "quick")
    monkeypatch.setenv(params.BUDGET, "huge")
    with pytest.raises(InputError, match="'huge'"):
        KSweepParams.from_cell(cell)
