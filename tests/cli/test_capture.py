"""Traces from the command line, from either engine, end to end; and what a generation adds to an investigation."""

import html
import json
import shlex
from contextlib import closing
from itertools import pairwise

import pytest

from specnb.book.divergence_report import acceptance_document, acceptance_line, read_acceptance
from specnb.divergence.capture import capture
from specnb.divergence.feeding import fed
from specnb.divergence.investigate import made_up
from specnb.divergence.script import run
from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, Trace, table
from specnb.errors import InputError
from specnb.lm.load import load
from specnb.measure.pair import run_pair
from tests.tiny_models import llama_gguf, torch_folder, torch_model

IDS = [[4, 9, 6, 7, 8], [11], [5, 10]]


def told(err):
    """The lines on stderr that are no progress bar's."""
    return [line for line in err.replace("\r", "\n").splitlines() if line.startswith("specnb: ")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by the engine that opens them."""
    folder = tmp_path_factory.mktemp("models")
    return {"torch": str(torch_folder(folder / "hf")), "llama.cpp": f"{llama_gguf(folder / 'llama.gguf')}?threads=1"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where a GGUF file is dequantised."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def write(specnb, tmp_path):
    """Run `capture` into a folder of this name: the document that it prints."""

    def written(name, *words):
        code, out, err = specnb("divergence", "capture", *words, "--out", str(tmp_path / name), "--json")
        assert code == 0, err
        return json.loads(out)

    return written


@pytest.fixture
def ids_file(tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(", ".join(map(str, line)) for line in IDS) + "\n\n")
    return str(file)


def steps(trace):
    return [(step["first_position"], step["token_ids"]) for step in trace.facts["steps"]]


# --- traces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "llama.cpp"])
def test_two_captures_of_the_same_are_compared_as_the_first_one_says(specnb, write, models, tmp_path, engine):
    first = write("a", models[engine], "--max-new-tokens", "3")
    assert first["engine"] == engine and first["steps"] == 4 and list(map(len, first["token_ids"])) == [16, 1, 1, 1]
    trace = Trace.load(tmp_path / "a")
    assert first["rows"] == len(trace.tensors) > 100 and first["reads"] == len(trace.params) > 10
    assert first["n_bytes"] == sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert trace.facts["opened"].startswith(models[engine])
    again, then = map(shlex.split, first["next"])
    changed = {"OTHER-MODEL": models[engine], "OTHER": str(tmp_path / "b")}
    again, then = ([changed.get(word, word) for word in words] for words in (again, then))
    code, out, _ = specnb(*again[1:])
    assert code == 0 and shlex.join(then) in out and "modules of" in out
    code, out, _ = specnb(*then[1:])
    assert code == 0 and out.startswith("SOUND: every tensor that was compared is equal in every bit")


@pytest.mark.parametrize("engine", ["torch", "llama.cpp"])
def test_the_tokens_after_the_prompt_are_those_of_plain_decoding(write, models, engine):
    from specnb import generate

    document = write("a", models[engine], "--max-new-tokens", "6", "--seed", "3")
    prompt, *after = document["token_ids"]
    with closing(load(models[engine])) as model:
        plain = generate(model, prompt, max_new_tokens=6, ignore_eog=True).token_ids
    assert [token for ids in after for token in ids] == list(plain)
    other = write("b", models[engine], "--max-new-tokens", "0", "--seed", "4")
    assert other["steps"] == 1 and other["token_ids"] != [prompt]


def test_a_prompt_is_fed_as_text(write, models):
    document = write("a", models["llama.cpp"], "--prompt", "ab", "--max-new-tokens", "1")
    with closing(load(models["llama.cpp"])) as model:
        assert document["token_ids"][0] == model.encode("ab")


@pytest.mark.parametrize(("engine", "other"), [("torch", "llama.cpp"), ("llama.cpp", "torch")])
def test_runs_of_two_engines_are_not_offered_for_comparison(specnb, write, models, tmp_path, engine, other):
    write("a", models[other], "--max-new-tokens", "1")
    words = ["--tokens", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    code, out, _ = specnb("divergence", "capture", models[engine], *words)
    assert code == 0 and f"{tmp_path / 'a'} is of {other}, and only runs of one engine are compared" in out
    again, then = (line.removeprefix("next: ") for line in out.splitlines() if line.startswith("next: "))
    # the same file in the engine that the last capture was of
    changed = {"OTHER-MODEL": models["llama.cpp"].partition("?")[0], "OTHER": str(tmp_path / "c")}
    again, then = ([changed.get(word, word) for word in shlex.split(line)[1:]] for line in (again, then))
    assert specnb(*again)[0] == 0
    assert {Trace.load(tmp_path / name).engine for name in "bc"} == {engine}
    assert then[1:] == ["compare", str(tmp_path / "b"), str(tmp_path / "c")]


def test_another_dtype_is_rounding(specnb, write, models, ids_file, tmp_path):
    write("a", models["torch"], "--tokens", ids_file)
    half = write("b", f"{models['torch']}?dtype=bfloat16", "--tokens", str(tmp_path / "a"))
    write("blocks", f"{models['torch']}?dtype=bfloat16", "--tokens", str(tmp_path / "a"), "--width", "3")
    code, out, _ = specnb(*shlex.split(half["next"][0])[1:], "--sound", str(tmp_path / "blocks"), "--json")
    document = json.loads(out)
    assert code == 0 and document["verdict"] in ("SOUND", "PRECISION_ONLY")
    assert document["coverage"]["equal"] < document["coverage"]["tensors"]


def test_another_model_is_divergent(specnb, write, models, ids_file, tmp_path):
    other = torch_model()
    other.model.layers[1].mlp.down_proj.weight.data[0] *= 2
    other.save_pretrained(tmp_path / "other")
    write("a", models["torch"], "--tokens", ids_file)
    found = write("b", str(tmp_path / "other"), "--tokens", str(tmp_path / "a"))
    code, out, _ = specnb(*shlex.split(found["next"][0])[1:], "--json")
    assert code == 1 and json.loads(out)["first"]["module"] == "layers.1.mlp.down_proj"


@pytest.mark.parametrize("engine", ["torch", "llama.cpp"])
def test_ids_of_a_file_are_fed_line_by_line(write, models, ids_file, tmp_path, engine):
    write("a", models[engine], "--tokens", ids_file)
    expected = [(0, IDS[0]), (5, IDS[1]), (6, IDS[2])]
    assert steps(Trace.load(tmp_path / "a")) == expected
    write("b", models[engine], "--tokens", ids_file, "--width", "3")
    assert steps(Trace.load(tmp_path / "b")) == [(0, [4, 9, 6]), (3, [7, 8, 11]), (6, [5, 10])]


@pytest.mark.parametrize("engine", ["torch", "llama.cpp"])
def test_what_a_run_took_back_is_taken_back_again(write, models, tmp_path, engine):
    model = torch_model().eval()
    with capture(model, modules="norm") as builder:
        run(model, made_up(model))
    builder.trace().save(tmp_path / "run")
    write("a", models[engine], "--tokens", str(tmp_path / "run"), "--modules", "norm")
    fed, again = (steps(Trace.load(tmp_path / name)) for name in ("run", "a"))
    assert again == fed and any(b < a for (a, _), (b, _) in pairwise(fed))


def test_padding_of_llama_cpp_is_not_fed_again(write, models, ids_file, tmp_path):
    padded = write("a", f"{models['llama.cpp']}&fixed_width=4", "--tokens", ids_file)
    assert padded["token_ids"][1] == [11] * 4
    assert write("b", models["llama.cpp"], "--tokens", str(tmp_path / "a"))["token_ids"] == IDS


def test_modules_and_whole_tensors_are_chosen_by_their_paths(write, models, ids_file, tmp_path):
    document = write("a", models["torch"], "--tokens", ids_file, "--modules", "mlp$", "--full", r"layers\.1\.")
    trace = Trace.load(tmp_path / "a")
    assert set(trace.tensors["module"]) == {"layers.0.mlp", "layers.1.mlp"} and document["modules"]["written"] == 2
    (row,) = trace.rows(module="layers.1.mlp", role="out", step=0)["row"]
    assert trace.array(row, "full").shape[:2] == (1, 5)
    assert trace.array(trace.rows(module="layers.0.mlp", role="out", step=0)["row"].iloc[0], "full") is None


def test_logits_that_are_no_numbers_end_the_text_and_not_the_trace(specnb, tmp_path):
    broken = torch_model()
    broken.model.layers[1].mlp.down_proj.weight.data[0] = float("nan")
    broken.save_pretrained(tmp_path / "model")
    code, _, err = specnb("divergence", "capture", str(tmp_path / "model"), "--out", str(tmp_path / "a"))
    assert code == 0 and "fed 16 tokens and no more" in told(err)[-1]
    spoilt = Trace.load(tmp_path / "a").tensors.query("n_nan > 0 and role == 'out'")
    assert spoilt.sort_values("order")["module"].iloc[0] == "layers.1.mlp.down_proj"


@pytest.mark.parametrize("inside", ["a folder", "a file"])
def test_what_is_there_is_left_alone(specnb, models, tmp_path, inside):
    out = tmp_path / "out"
    if inside == "a folder":
        out.mkdir()
        (out / "mine").write_text("x")
    else:
        out.write_text("x")
    code, _, err = specnb("divergence", "capture", models["torch"], "--out", str(out))
    assert code == 2 and "not an empty folder" in told(err)[0]
    assert ((out / "mine") if out.is_dir() else out).read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--tokens", "FILE", "--prompt", "x"], ["leave --prompt x out"]),
        (["--prompt", "x", "--seed", "1"], ["--seed 1 is that of random ids"]),
        (["--width", "5"], ["--width 5"]),
        (["--modules", "("], ["regular expression", "("]),
        (["--modules", "no_such"], ["--modules no_such is in no path"]),
        (["--max-new-tokens", "49"], ["65 tokens are to be fed", "holds 64", "n_ctx"]),
    ],
    ids=lambda x: " ".join(x)[:30],
)
def test_wrong_words_are_one_line_and_leave_nothing(specnb, models, ids_file, tmp_path, words, parts):
    words = [ids_file if word == "FILE" else word for word in words]
    code, out, err = specnb("divergence", "capture", models["torch"], *words, "--out", str(tmp_path / "out"))
    assert code == 2 and out == "" and len(told(err)) == 1, err
    assert all(part in told(err)[0] for part in parts), err
    assert [path.name for path in tmp_path.iterdir()] == ["ids.txt"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "at least one feed"),
        ("1 2\n3 -4", "line 2: '-4' is no token id"),
        ("9" * 5000, "is no token id"),
        ("1 99", "token id 99 is outside the vocabulary"),
    ],
)
def test_a_file_of_anything_else_is_one_line(specnb, models, tmp_path, content, part):
    (tmp_path / "ids").write_text(content)
    words = ["--tokens", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    code, _, err = specnb("divergence", "capture", models["torch"], *words)
    assert code == 2 and part in told(err)[0] and len(told(err)[0]) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


STEP = {"step": 0, "batch": 1, "length": 2, "first_position": 0, "token_ids": [1, 2]}


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        ([], "0"),
        ([STEP | {"first_position": 3}], "3"),
        ([STEP, STEP | {"first_position": 3}], "3"),
        ([STEP | {"batch": 2}], "2 rows"),
        ([STEP | {"length": 9}], "9"),
    ],
)
def test_a_trace_that_cannot_be_fed_again_is_refused(tmp_path, steps, value):
    Trace({"steps": steps}, table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), {}).save(tmp_path)
    with pytest.raises(InputError) as refused:
        fed(tmp_path)
    assert not steps or value in str(refused.value)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("backend", ["hf", "llama"])
def test_the_real_model_is_captured_by_both_engines(specnb, tmp_path, backend, monkeypatch):
    monkeypatch.undo()  # the fetched model's own cache
    first = ["smollm2-135m", "--backend", backend, "--prompt", "def f(n):", "--max-new-tokens", "2"]
    code, out, err = specnb("divergence", "capture", *first, "--modules", "norm", "--out", str(tmp_path / "a"))
    assert code == 0 and "modules of smollm2-135m" in out, err
    again = ["smollm2-135m", "--backend", backend, "--tokens", str(tmp_path / "a"), "--modules", "norm"]
    assert specnb("divergence", "capture", *again, "--out", str(tmp_path / "b"))[0] == 0
    code, out, _ = specnb("divergence", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0 and out.startswith("SOUND: ")


# --- what stands beside an investigation ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """A draft whose weights are others than those of the tiny llama."""
    return str(llama_gguf(tmp_path_factory.mktemp("unlike") / "draft.gguf", seed=1))


@pytest.fixture(scope="module")
def generated(models, unlike):
    """What `specnb generate --json` prints."""
    made = run_pair(models["llama.cpp"], f"{unlike}?threads=1", "", k=4, max_new_tokens=60, ignore_eog=True)
    return made.model_dump(mode="json") | {"triage": None}


@pytest.fixture
def generation(generated, tmp_path):
    (tmp_path / "generation.json").write_text(json.dumps(generated))
    return tmp_path / "generation.json"


def test_a_generation_puts_its_acceptance_into_verdict_and_report(specnb, unlike, generation, tmp_path):
    words = ["--draft", unlike, "--setups", "S0", "--generation", str(generation), "--report", str(tmp_path / "report")]
    code, out, err = specnb("divergence", "investigate", *words, "--json")
    accepted, expected = json.loads(out)["acceptance"], read_acceptance(generation, vocab_size=64)
    assert code == 0 and accepted["alpha"][0]["n"] > 20, err
    assert accepted == acceptance_document(expected) and accepted["verdict"] == expected.verdict
    assert json.loads((tmp_path / "report" / "report.json").read_text())["acceptance"] == accepted
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h2>Acceptance</h2>" in page and html.escape(acceptance_line(expected)) in page
    code, out, _ = specnb("divergence", "investigate", *words[:-2])
    assert code == 0 and out.splitlines()[-1] == f"Acceptance: {acceptance_line(expected)}"


@pytest.mark.slow
def test_a_draft_that_llama_cpp_runs_is_said_to_be_judged_in_torch(specnb, models):
    file, folder = models["llama.cpp"].partition("?")[0], models["torch"]
    for name, is_said in ((file, True), (f"{file}?backend=hf", False), (folder, False), ("pair", False)):
        code, _, err = specnb("divergence", "investigate", "--draft", name, "--setups", "S0", "--json")
        lines = [line for line in told(err) if "not llama.cpp's" in line]
        assert code == 0 and len(lines) == is_said
        if is_said:
            assert f"specnb divergence capture {name} --backend llama" in lines[0]
            assert "specnb divergence compare" in lines[0]


def changed(document, at, value):
    """The document with another value in one place."""
    document = json.loads(json.dumps(document))
    *way, last = at
    inside = document
    for key in way:
        inside = inside[key]
    inside[last] = value
    return document


OTHER_FILES = {
    "no file": (None, "generation.json"),
    "no JSON": ("{", "generation.json"),
    "another document": ("{}", "generation: Field required"),
    "plain": ((["generation", "drafter"], ""), "nothing was drafted"),
    "other tokens": ((["generation", "prompt_ids"], [64]), "no token 64 (0 to 63)"),
    "no round": ((["generation", "rounds", 0], 7), "generation.rounds.0"),
    "tokens of no round": ((["generation", "token_ids"], [3]), "generation.json"),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_a_file_that_is_no_generation_is_one_error(generation, case):
    change, part = OTHER_FILES[case]
    if change is None:
        generation.unlink()
    elif isinstance(change, str):
        generation.write_text(change)
    else:
        generation.write_text(json.dumps(changed(json.loads(generation.read_text()), *change)))
    with pytest.raises(InputError) as failed:
        read_acceptance(generation, vocab_size=64)
    assert part in str(failed.value) and len(str(failed.value)) < 600


def test_an_investigation_without_its_generation_judges_nothing(specnb, models, tmp_path):
    words = ["--draft", models["torch"], "--setups", "S0", "--generation", str(tmp_path / "none.json")]
    code, out, err = specnb("divergence", "investigate", *words)
    assert code == 125 and out == "" and len(told(err)) == 1 and "none.json" in told(err)[0]


def test_the_commands_are_listed_in_the_order_of_use_each_on_one_line(specnb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = specnb("divergence", "--help")
    listed = [line.split(None, 1) for line in out.split("Commands:\n")[1].splitlines() if line.strip()]
    assert code == 0
    assert [name for name, _ in listed] == [
        "preflight",
        "investigate",
        "capture",
        "compare",
        "audit",
        "faults",
    ]
    assert all(told.endswith((".", "?")) and not told.endswith("...") for _, told in listed)
