"""S7: the features a fault needs are found by switching them off, alone or together."""

import json
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specnb.divergence.coverage import Coverage
from specnb.divergence.deploy import imported
from specnb.divergence.faults import FAULTS
from specnb.divergence.features import checked, switched_off
from specnb.divergence.investigate import judge
from specnb.divergence.report import text
from specnb.errors import InputError

NAMES = ("compile", "graphs", "prefix_cache", "fusion", "backend")


class Told:
    """Stands for a lab whose draft is healed by rules over what is off: any one of `healing`, whole.

    The service does not run without any of `refused`.
    """

    def __init__(self, healing, refused=("refused",)):
        self.healing, self.runs, self.draft = [frozenset(one) for one in healing], [], None
        self.refused = {*refused}

    def run(self, setup, deploy):
        with deploy(None, None) as off:
            self.runs.append(off)
        clean = any(one <= off for one in self.healing)
        wrong = pd.DataFrame({"module": ["layers.0.mlp", "norm"], "position": [3, 4]})
        if self.refused & off:
            raise InputError("no backend is left")
        return SimpleNamespace(clean=clean, wrong=wrong.iloc[:0] if clean else wrong)


def service(draft, neighbour, without=frozenset()):
    return nullcontext(without)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=3))
def test_what_is_needed_heals_and_nothing_smaller_does(healing):
    lab = Told(healing)
    found = switched_off(lab, service, NAMES)
    alone = tuple(name for name in NAMES if {name} in healing)
    assert len(lab.runs) == len(set(lab.runs)) == len(found.runs) <= 2 * len(NAMES) + 2
    if alone:
        assert found.needed == alone and not found.together
    elif healing:
        needed = set(found.needed)
        assert found.together and any(one <= needed for one in healing)
        assert not any(one <= needed - {name} for one in healing for name in needed)
    else:
        assert found.needed == () and "none of them alone is needed" in found.line
    assert found.runs["off"].tolist()[0] == () and not found.runs["clean"].tolist()[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=3), st.sets(st.sampled_from(NAMES)))
def test_features_without_which_nothing_runs_hide_none_of_the_others(healing, refused):
    found = switched_off(Told(healing, refused), service, NAMES)
    possible = [one for one in healing if not one & refused]
    assert bool(found.needed) == bool(possible) and not refused & {*found.needed}
    assert not found.together or any(one <= {*found.needed} for one in possible)


def test_the_runs_say_what_was_off_and_what_was_wrong():
    found = switched_off(Told([{"graphs"}]), service, ["graphs", "fusion"], setup="S2")
    assert found.runs.to_dict("records") == [
        {"off": (), "clean": False, "first": "layers.0.mlp", "tokens": 2, "said": ""},
        {"off": ("graphs",), "clean": True, "first": "", "tokens": 0, "said": ""},
        {"off": ("fusion",), "clean": False, "first": "layers.0.mlp", "tokens": 2, "said": ""},
    ]
    assert found.line == "S2 is clean without graphs, and wrong with all features on"
    assert found.facts()["runs"][1]["off"] == ["graphs"]
    together = switched_off(Told([{"graphs", "fusion"}]), service, ["graphs", "compile", "fusion"])
    assert together.line == "S3 is clean without graphs and fusion, and wrong with all features on"


def test_a_service_that_does_not_run_without_a_feature_loses_no_other_run():
    found = switched_off(Told([{"graphs"}]), service, ["refused", "graphs"])
    assert found.needed == ("graphs",) and found.runs["clean"].tolist() == [False, None, True]
    none = switched_off(Told([]), service, ["refused", "graphs"])
    assert none.needed == () and "stays wrong without graphs" in none.line
    assert "it does not run without refused (no backend is left)" in none.line


def test_a_service_may_raise_anything_without_a_feature():
    class Exits(Told):
        def run(self, setup, deploy):
            super().run(setup, deploy)
            if self.runs[-1]:
                raise SystemExit("graphs are built in")
            return SimpleNamespace(clean=False, wrong=pd.DataFrame({"module": ["norm"], "position": [0]}))

    found = switched_off(Exits([]), service, ["graphs"])
    assert "without any that it runs without" in found.line and "SystemExit: graphs are built in" in found.line


def test_a_run_with_all_features_on_that_fails_is_no_finding():
    class Fails(Told):
        def run(self, setup, deploy):
            raise InputError("S3 runs the draft beside the target: give one")

    with pytest.raises(InputError, match="give one"):
        switched_off(Fails([]), service, ["graphs", "compile"])


def test_a_fault_that_comes_and_goes_needs_no_feature():
    found = switched_off(Told([frozenset()]), service, ["graphs"])
    assert found.needed == () and len(found.runs) == 1 and found.line.endswith("the fault comes and goes")


def test_what_was_not_looked_at_whole_is_not_healed(monkeypatch):
    monkeypatch.setattr(Coverage, "of", lambda outcome, draft: SimpleNamespace(complete=False))
    assert switched_off(Told([{"graphs"}]), service, ["graphs"]).needed == ()


@pytest.fixture(autouse=True)
def seen_whole(request, monkeypatch):
    """`Told` has no trace to tell coverage from."""
    if "divergence_lab" not in request.fixturenames:
        monkeypatch.setattr(Coverage, "of", lambda outcome, draft: SimpleNamespace(complete=True))


@contextmanager
def planted(draft, neighbour, without=frozenset()):
    with nullcontext() if "registry" in without else FAULTS["positional_registry"](draft, neighbour):
        yield


def test_a_fault_of_one_feature_is_found_and_told_in_an_investigation(divergence_lab):
    found = judge(divergence_lab, deploy=planted, setups=["S0", "S2"], features=["graphs", "registry"])
    assert found.features.setup == "S2" and found.features.needed == ("registry",)
    assert found.features.runs.set_index("off").loc[[("graphs",)], "first"].item() == "layers.0.mlp.experts"
    assert "S2 is clean without registry, and wrong with all features on." in text(found)
    assert json.loads(json.dumps(found.document()))["features"]["needed"] == ["registry"]


def test_where_nothing_is_wrong_nothing_is_switched_off(divergence_lab):
    found = judge(divergence_lab, deploy=planted, setups=["S0"], features=["registry"])
    assert found.features is None and found.document()["features"] is None


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
    with pytest.raises(InputError, match="unable cannot leave features out"):
        checked(unable, ["graphs"])


@pytest.mark.parametrize("features", [(), ["graphs", "graphs"], "graphs", ["", "graphs"]])
def test_features_are_names_each_once(features):
    with pytest.raises(InputError, match="names of one or more"):
        switched_off(Told([]), service, features)


def test_a_service_that_cannot_leave_features_out_is_told_how():
    def plain(draft, neighbour):
        return nullcontext()

    with pytest.raises(InputError, match="plain cannot leave features out: give a `deploy` with a parameter `without`"):
        switched_off(Told([]), plain, ["graphs"])
