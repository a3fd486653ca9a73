"""`specnb divergence capture` and `compare`: traces from the command line, end to end."""

import json
from contextlib import closing, nullcontext
from itertools import pairwise

import pytest

from specnb.decode.generate import generate
from specnb.divergence.capture import capture
from specnb.divergence.investigate import random_script
from specnb.divergence.script import feed_script
from specnb.divergence.trace import ModuleTrace
from specnb.lm.load import load
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.conftest import errors
from tests.tiny_models import llama_gguf, torch_model


@pytest.fixture
def write(specnb, tmp_path):
    """Return a function that captures into a folder and returns the printed document."""

    def written(name, *words):
        code, out, err = specnb(
            "divergence", "capture", *words, "--out", str(tmp_path / name), "--json"
        )
        assert code == 0, err
        return json.loads(out)

    return written


def steps(folder):
    return [
        (step["first_position"], step["token_ids"])
        for step in ModuleTrace.load(folder).facts["steps"]
    ]


def test_two_captures_of_a_gguf_file_are_compared(specnb, write, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    file = str(llama_gguf(tmp_path / "llama.gguf"))
    first = write("a", file, "--prompt", "ab", "--max-new-tokens", "3")
    assert first["engine"] == "torch" and first["steps"] == 4 and first["rows"] > 100
    with closing(load(file, backend="hf")) as model:
        prompt, *after = first["token_ids"]
        assert prompt == model.encode("ab")
        plain = generate(model, prompt, max_new_tokens=3, ignore_eog=True).token_ids
    assert [token for ids in after for token in ids] == list(plain)
    folders = [str(tmp_path / name) for name in "ab"]
    write("b", file, "--tokens", folders[0])
    code, out, _ = specnb("divergence", "compare", *folders)
    assert code == 0 and out.startswith("SOUND: ")


def test_captured_tokens_are_fed_again_with_rollbacks(write, tiny, tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("4, 9, 6, 7, 8\n11\n5, 10\n\n")
    write("a", tiny, "--tokens", str(file))
    assert steps(tmp_path / "a") == [(0, [4, 9, 6, 7, 8]), (5, [11]), (6, [5, 10])]
    model = torch_model().eval()
    with capture(model, tmp_path / "run"):
        feed_script(model, random_script(model))
    write("again", tiny, "--tokens", str(tmp_path / "run"))
    assert steps(tmp_path / "again") == steps(tmp_path / "run")
    assert any(b < a for (a, _), (b, _) in pairwise(steps(tmp_path / "run")))


@pytest.mark.parametrize(
    ("words", "ids", "value"),
    [
        ("--tokens ids --prompt x", "1 2", "--prompt"),
        ("--out .", "", "--out"),
        ("--max-new-tokens 49", "", "64 and 1 more"),
        ("--tokens ids", "", "feed"),
        ("--tokens ids", "1 2\n3 x4", "line 2"),
        ("--tokens ids", "1 99", "99"),
    ],
)
def test_invalid_options_are_one_line_and_leave_no_files(
    specnb, tiny, tmp_path, monkeypatch, words, ids, value
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids").write_text(ids)
    code, out, err = specnb("divergence", "capture", tiny, "--out", "out", *words.split())
    (line,) = errors(err)
    assert code == 2 and out == "" and value in line and len(line) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


# --- compare --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Return folders of traces of a tiny model: two equal ones, one with a random head, and the
    latter with the module paths of an engine that wraps it."""
    model = torch_model().eval()
    folder = tmp_path_factory.mktemp("traces")
    script = random_script(model, tokens=18, prompt=14)
    for name in ("a", "b", "wrong"):
        service = FAULTS["random_head"](model) if name == "wrong" else nullcontext()
        with service, capture(model, folder / name):
            feed_script(model, script)
    trace = ModuleTrace.load(folder / "wrong")
    for table in (trace.tensors, trace.params):
        table["module"] = "engine." + table["module"]
    trace.save(folder / "engine")
    return {name: str(folder / name) for name in ("a", "b", "wrong", "engine", "none")}


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        ("a b", 0, "SOUND: "),
        ("a wrong --sound b", 1, "DIVERGENT: first at lm_head"),
        (r"a engine --rename ^engin=x --rename ^xe\.(?=.*)=", 1, "DIVERGENT: first at lm_head"),
        ("a none", 125, "none"),
        ("a engine", 125, "--rename OLD=NEW"),
        ("a b --rename (=x", 2, "("),
    ],
)
def test_traces_are_compared_by_folder_and_module_paths_can_be_renamed(
    specnb, traces, words, code, value
):
    words = [traces.get(word, word) for word in words.split()]
    got, out, err = specnb("divergence", "compare", *words)
    assert got == code
    assert out.startswith(value) if code < 2 else out == "" and value in errors(err)[0]
