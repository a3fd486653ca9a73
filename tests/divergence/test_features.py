"""S7: the features a fault needs are found by switching them off, alone or together."""

import json
import sys
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.divergence.faults import FAULTS
from specnb.divergence.features import checked, imported, switched_off
from specnb.divergence.investigate import judge
from specnb.divergence.report import text
from specnb.errors import InputError

NAMES = ("compile", "graphs", "prefix_cache", "fusion", "backend")


class Healed:
    """A set-up that is healed by rules over what is off: any one of `healing`, whole. It needs all of `required`."""

    def __init__(self, healing, required=("required",), error=InputError):
        self.healing, self.required, self.error = [frozenset(one) for one in healing], {*required}, error
        self.runs = []

    def __call__(self, off):
        self.runs.append(off)
        if self.required & off:
            raise self.error("no backend is left")
        clean = any(one <= off for one in self.healing)
        return (True, "", 0) if clean else (False, "layers.0.mlp", 2)


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=3), st.sets(st.sampled_from(NAMES)))
def test_what_is_needed_heals_and_nothing_smaller_does(healing, required):
    run = Healed(healing, required)
    found = switched_off(run, NAMES)
    assert len(run.runs) == len(set(run.runs)) == len(found.runs) <= 2 * len(NAMES) + 2
    assert found.runs["off"].tolist()[0] == () and not found.runs["clean"].tolist()[0]
    possible = [one for one in healing if not one & required]
    alone = tuple(name for name in NAMES if {name} in possible)
    needed = set(found.needed)
    assert not required & needed
    if alone:
        assert found.needed == alone and not found.together
    elif possible:
        assert found.together and any(one <= needed for one in possible)
        assert not any(one <= needed - {name} for one in possible for name in needed)
    else:
        assert found.needed == () and "stays wrong" in found.line


def test_the_runs_say_what_was_off_and_what_was_wrong():
    found = switched_off(Healed([{"graphs"}]), ["required", "graphs", "fusion"], setup="S2")
    assert found.runs.to_dict("records") == [
        {"off": (), "clean": False, "first": "layers.0.mlp", "tokens": 2, "said": ""},
        {"off": ("required",), "clean": None, "first": "", "tokens": 0, "said": "no backend is left"},
        {"off": ("graphs",), "clean": True, "first": "", "tokens": 0, "said": ""},
        {"off": ("fusion",), "clean": False, "first": "layers.0.mlp", "tokens": 2, "said": ""},
    ]
    assert found.needed == ("graphs",) and found.line.startswith("S2 is clean without graphs")
    assert found.facts()["runs"][2]["off"] == ["graphs"]


def test_a_service_may_raise_anything_without_a_feature_and_nothing_with_all():
    found = switched_off(Healed([], ["graphs"], SystemExit), ["graphs"])
    assert "SystemExit: no backend is left" in found.line

    def fails(off):
        raise InputError("S3 runs the draft beside the target")

    with pytest.raises(InputError, match="S3"):
        switched_off(fails, ["graphs", "compile"])
    comes_and_goes = switched_off(Healed([frozenset()]), ["graphs"])
    assert comes_and_goes.needed == () and len(comes_and_goes.runs) == 1


@contextmanager
def planted(draft, neighbour, without=frozenset()):
    with nullcontext() if "registry" in without else FAULTS["positional_registry"](draft, neighbour):
        yield


def test_a_fault_of_one_feature_is_found_and_told_in_an_investigation(divergence_lab):
    found = judge(divergence_lab, deploy=planted, setups=["S0", "S2"], features=["graphs", "registry"])
    assert found.features.setup == "S2" and found.features.needed == ("registry",)
    assert found.features.runs.set_index("off").loc[[("graphs",)], "first"].item() == "layers.0.mlp.experts"
    assert found.features.line in text(found)
    assert json.loads(json.dumps(found.document()))["features"]["needed"] == ["registry"]
    assert judge(divergence_lab, deploy=planted, setups=["S0"], features=["registry"]).features is None


def test_a_service_by_name_takes_features_if_its_own_function_does(tmp_path, monkeypatch):
    (tmp_path / "two_services.py").write_text(
        "from contextlib import nullcontext\n"
        "def able(draft, neighbour, without=()):\n    seen.append(without)\n    return nullcontext()\n"
        "def unable(draft, neighbour):\n    return nullcontext()\n"
        "seen = []\n"
    )
    monkeypatch.chdir(tmp_path)
    able, unable = (imported(f"two_services:{name}") for name in ("able", "unable"))
    assert checked(able, ["graphs"]) == ("graphs",)
    with able(None, None, without=frozenset({"graphs"})), able(None, None):
        pass
    assert sys.modules["two_services"].seen == [frozenset({"graphs"}), ()]
    with pytest.raises(InputError, match="unable"):
        checked(unable, ["graphs"])
