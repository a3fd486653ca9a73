"""The command line: exit codes, one-line errors, JSON on stdout, and parameters."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specnb import cli, doctor
from specnb.book import engine, notebook
from specnb.book.engine import NotebookOutcome
from specnb.cli import show
from specnb.cli.app import MOVED
from specnb.io import write_atomic
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary
from specnb.measure import experiment
from tests.conftest import errors


def is_mistake(result, *parts):
    """Require exit code 2, an empty stdout, and one line on stderr that contains `parts`."""
    code, out, err = result
    assert code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1, err
    assert err.startswith("specnb: ") and all(part in err for part in parts), err


def test_compat_judges_a_pair_with_findings_and_more_models_as_a_matrix(specnb, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, _ = specnb("compat", "deepseek-r1-distill-qwen-32b", "qwen2.5-0.5b-instruct")
    assert code == 0 and "needs translation" in out and "llama.cpp: refuses: add_bos" in out
    pair = ("compat", "qwen2.5-coder-32b", "qwen2.5-0.5b-instruct", "--json")
    document = json.loads(specnb(*pair)[1])
    assert document["verdict"] == "works with slicing" and document["findings"][0]["remedy"]
    rows = json.loads(specnb("compat", "gpt-neox", "mpt", "llama-3.2-1b-instruct", "--json")[1])
    assert [r["verdict"] for r in rows[:2]] == ["drop-in", "unknown"] and len(rows) == 6
    is_mistake(specnb("compat", "gpt-2", "nothing-like-it"), "nothing-like-it")


@pytest.mark.model
def test_describe_reports_whether_a_model_opens(specnb):
    facts = json.loads(specnb("describe", "smollm2-135m", "--json")[1])
    expected = {"opens": "yes", "engine": "llama.cpp", "state": "attention", "n_layers": 30}
    assert expected.items() <= facts.items() and facts["certificate"]
    assert facts["rewind"] in facts["strategies"]
    facts = json.loads(specnb("describe", "gpt-2", "--json")[1])
    assert facts["opens"].startswith("no") and "engine" not in facts


def test_certify_prints_a_certificate_and_exits_with_one_if_it_is_below_64(
    specnb, tiny, monkeypatch
):
    # opening it probes and caches the certificate, which must be the true one
    specnb("describe", "--certify", tiny)
    for widest in (9, 64):
        monkeypatch.setattr(
            "specnb.lm.probe.certify",
            lambda model, widths, n_steps, widest=widest: min(widest, max(widths)),
        )
        code, out, _ = specnb("describe", "--certify", tiny, "--json")
        found = json.loads(out)
        assert (code, found["same_bits_up_to"]) == (int(widest < 64), widest)
        assert found["model"] == tiny and found["certificate"] and "exact_by" in found


@pytest.fixture
def models(open_with):
    """Open toys instead of real models."""
    open_with(lambda name, **options: toy.cyclic(5))


REFUSED = {
    "--draft draft --drafter lookup": ["'draft'", "'lookup'"],
    "--k -1": ["-1"],
    "--controller cost": ["'cost'", "cost-aware"],
    "--drafter lokup": ["'lokup'", "lookup"],
    "--draft smollm2-135m?thread=1": ["thread", "threads"],
    "--target absent.gguf": ["absent.gguf"],
}


@pytest.mark.parametrize(("words", "parts"), REFUSED.items())
def test_an_invalid_option_is_refused_before_a_model_is_loaded(specnb, monkeypatch, words, parts):
    monkeypatch.setattr("specnb.draft.load.load", lambda name: pytest.fail("loaded"))
    is_mistake(specnb("generate", "ab", *words.split(" ")), *parts)


FIVE = ("generate", "ab", "--target", "five", "--draft", "draft", "--k", "3", "--max-new-tokens")


def test_generate_prints_one_sentence_the_numbers_with_v_or_one_document(
    specnb, models, monkeypatch
):
    out = specnb(*FIVE, "10")[1]
    assert out.startswith("cdeabcdeab\n") and "\x1b" not in out
    assert out.count(" times as fast") == 1 and "7 of 7" in out and "tokens per s" not in out
    assert "tokens per s" in specnb(*FIVE, "10", "-v")[1].replace("_", " ")
    code, out, err = specnb(*FIVE, "10", "--baseline", "--json")
    document = json.loads(out)
    assert code == 0 and errors(err) == [] and "five" in err and out.count("\n") == 1
    assert list(document) == ["generation", "baseline", "summary", "triage"]
    for text in ("generation", "baseline"):
        assert document[text]["token_ids"] == [2, 3, 4, 0, 1] * 2
    facts = {"identical": True, "fork": None, "acceptance_rate": 1.0, "n_tokens": 10}
    assert facts.items() <= document["summary"].items() and document["summary"]["speedup"] > 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    green = re.findall(r"\x1b\[32m(.)", specnb(*FIVE, "6")[1].partition("\n")[0])
    assert green == [*"cdeb"], "accepted draft tokens on a terminal"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_file(monkeypatch, stream):
    now = iter(range(0, 999, 12))
    err = stream()
    monkeypatch.setattr(experiment, "perf_counter", lambda: next(now))
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(KeyError), experiment.ProgressBar() as progress:
        for done in range(6):
            progress(done, 6, f"step {done}")
        raise KeyError
    if stream is Terminal:  # the bar is cleared before an error is printed
        *_, last, cleared, end = err.getvalue().split("\r")
        assert "step 5" in last + cleared and not cleared.strip() + end.strip()
    else:
        assert err.getvalue().splitlines() == ["0/6 step 0", "3/6 step 3"], "a line every 30 s"


def test_lab_opens_copies_with_working_links_and_never_replaces_one(specnb, monkeypatch, tmp_path):
    for path in ("notebooks/00_a.ipynb", "notebooks/01_b.ipynb", "figures/f.html"):
        write_atomic(tmp_path / path, path.encode())
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path / "results"))
    for module in (sys.modules["specnb.cli.app"], notebook):
        monkeypatch.setattr(module, "project_dir", lambda: tmp_path)
    called = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 7)
    folder = tmp_path / "results/lab/notebooks"
    copy = folder / "00_a.ipynb"
    options = ["--allow-root", "--port", "8888"]
    for words, opened in (([], copy), (["01", *options], folder / "01_b.ipynb")):
        assert specnb("lab", *words) == (7, "", "")
        assert called.pop()[5:] == [str(opened), *words[1:]]
    assert (folder / "../figures/f.html").read_text() == "figures/f.html"
    copy.write_text("mine")
    (tmp_path / "notebooks/00_a.ipynb").write_text("new")
    assert specnb("lab")[2] == "" and copy.read_text() == "mine"
    copy.unlink()
    assert specnb("lab")[2] == "" and copy.read_text() == "new"


def test_control_sequences_and_unencodable_characters_are_escaped(specnb, open_with, monkeypatch):
    hostile = toy.ToyLM(
        toy.cyclic(3)._logits_of, Vocabulary(("\x1b[2J\x9b\r\n😀".encode(), b"b\tc\n", b"x"))
    )
    open_with(lambda name: hostile)
    words = ["generate", "x", "--target", "x", "--max-new-tokens", "4"]
    out = specnb(*words)[1]
    assert not {"\x1b", "\x9b", "\r"} & set(out) and r"\x1b[2J" in out and "b\tc\n" in out
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert specnb(*words)[0] == 0
    sys.stdout.flush()
    assert b"\\U0001f600" in sys.stdout.buffer.getvalue()


@pytest.fixture
def runs(monkeypatch):
    """Replace the engine; return the list of runs with parameters. Notebooks named bad* fail."""
    noted = []

    def run_notebook(path, params, **options):
        noted.append((path.stem, params))
        error = (
            {"kind": "KeyError", "message": "'x'", "cell": 2}
            if path.stem.startswith("bad")
            else None
        )
        status = "failed" if error else "completed"
        return NotebookOutcome(
            path.name, "0", "r", params, status, error, "", "", 1.0, "notebook.ipynb"
        )

    monkeypatch.setattr(engine, "run_notebook", run_notebook)
    monkeypatch.setattr(notebook, "find_notebook", Path)
    monkeypatch.setattr(notebook, "notebooks", lambda: [Path("01_a.ipynb"), Path("02_b.ipynb")])
    monkeypatch.setattr("specnb.lm.files.zoo_file", lambda name: None)
    return noted


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (["-p", "ks=[2,4]", "--parameter", "target", "x=y"], {"ks": [2, 4], "target": "x=y"}),
        (["-p", "seed", "-1"], {"seed": -1}),
        (["-p", "target", ""], {"target": ""}),
    ],
)
def test_parameters_are_one_or_two_words_before_or_after_the_name(specnb, runs, words, params):
    for line in (["01_a", *words], [*words, "01_a"]):
        assert specnb("run", *line, "--json")[0] == 0 and runs.pop() == ("01_a", params)


def test_no_name_runs_all_in_order_also_after_a_failure_and_invalid_parameters_none(specnb, runs):
    for words in (["-p", "ks"], ["-p", "ks", "1", "-p", "ks=2"]):
        is_mistake(specnb("run", "01_a", *words), "'ks'")
    is_mistake(specnb("run", "-p", "k", "1"), "-p is for one notebook, but 2 are to run")
    assert runs == [] and specnb("run")[0] == 0 and [name for name, _ in runs] == ["01_a", "02_b"]
    code, out, err = specnb("run", "01_a", "bad_one", "02_b", "--json")
    assert code == 1 and [o["status"] for o in json.loads(out)] == [
        "completed",
        "failed",
        "completed",
    ]
    assert err.splitlines() == ["specnb: bad_one: cell 2 (from 0): KeyError: 'x'"]


def test_the_zoo_is_listed(specnb, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    first, *_ = json.loads(specnb("models", "--json")[1])
    assert first["name"] == "smollm2-135m" and first["present"] is False
    assert "Apache-2.0" in specnb("models")[1]


TABLES = [
    (["run_id", "params"], [["f3d1bcdd9791", "seed=1, " * 30]], ""),
    (
        ["name", *"abcde"],
        [["Qwen2.5-Coder-32B-Instruct", *["some words, and more"] * 5]],
        "d, e",
    ),
    (["name"], [], ""),
]


@pytest.mark.parametrize(("columns", "rows", "left_out"), TABLES)
def test_a_narrow_table_keeps_the_first_column_and_names_omitted_columns(
    capsys, monkeypatch, columns, rows, left_out
):
    monkeypatch.setenv("COLUMNS", "80")
    show.print_table("title [b]", columns, rows)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "title [b]" and all(row[0] in "".join(lines) for row in rows)
    *table, last = lines or [""]
    assert max(map(len, table), default=0) <= 80
    assert (f"no room for {left_out}:" in last) == bool(left_out) == ("no room" in last)


@pytest.mark.parametrize("old", MOVED)
def test_a_command_of_an_earlier_version_names_its_replacement(specnb, old):
    is_mistake(specnb(*old.split(), "x"), f"specnb {MOVED[old]}")


@pytest.mark.parametrize(
    "words",
    [
        "lookup suffix --row r",
        "--row r",
        "d --page p --heads-checkpoint h",
        "--page p",
        "lookup --row r --categories code",
    ],
)
def test_unsupported_output_options_are_refused_before_measuring(specnb, monkeypatch, words):
    monkeypatch.setattr("specnb.measure.machines.load", lambda name: pytest.fail("loaded"))
    is_mistake(
        specnb("bench", "absent.gguf", *words.split()), words[words.index("--") :].split()[0]
    )


def test_bench_prints_one_document_and_forward_passes_without_a_drafter(
    specnb, monkeypatch, tmp_path
):
    monkeypatch.setattr("specnb.measure.machines.RATES", {"n_prompt": 4, "n_gen": 2, "repeats": 1})
    monkeypatch.setattr("specnb.measure.machines.load", lambda name: toy.cyclic(5))
    file = tmp_path / "mine.jsonl"
    file.write_text('{"task_id": 1, "prompt": "ab"}\n{"task_id": 2, "prompt": "ab"}')
    sizes = ["--prompts-per-category", "2", "--k", "2", "--max-new-tokens", "4"]
    words = ["bench", "five", "--prompts", str(file), *sizes]
    document = json.loads(specnb(*words, "lookup", "--json")[1])
    assert list(document["rows"]) == [] and document["pairs"][0]["table"][1]["n_prompts"] == 2
    assert "T(n)/T(1)" in specnb(*words)[1]


@pytest.mark.parametrize("ok", [True, None, False])
def test_check_exits_with_one_when_something_is_missing(specnb, monkeypatch, ok):
    found = doctor.Prerequisite("x", ok, "found", "do this")
    monkeypatch.setattr(doctor, "diagnose", lambda decode: [found])
    code, out, _ = specnb("check", "--json")
    assert code == (ok is False) and json.loads(out) == [found._asdict()]
    assert ("do this" in specnb("check")[1]) == (ok is not True)
    assert "do this" in specnb("check", "-v")[1]


def test_the_log_of_another_engine_is_judged_for_a_machine(specnb):
    words = ("results", "--from", "data/logs/sglang.json", "--t8", "1.1")
    document = json.loads(specnb(*words, "--json")[1])
    assert document["requests"] == 1 and document["advice"][0]["verdict"] == "undecided"
    assert [row["k"] for row in document["tau"] if row["own"]] == [5]
    assert "one request: no verdict" in specnb(*words)[1]


def test_invalid_words_exit_with_two_and_show_the_usage_or_one_line(specnb):
    for words in (
        "generat",
        "generate --targett x",
        "models --get",
        "generate x --max-new-tokens 0",
    ):
        result = CliRunner().invoke(cli.app, words.split())
        assert result.exit_code == 2 and "Usage" in result.output
    is_mistake(
        specnb("heads", "convert", "smollm2-135m-hydra", "--to", "vlm", "--out", "x"), "'vlm'"
    )
    words = ("bench", "absent.gguf", "lookup", "--heads-checkpoint", "smollm2-135m-hydra")
    is_mistake(specnb(*words), "heads_checkpoint")


def test_help_fits_a_screen_and_shows_at_most_twelve_options_of_a_command(specnb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert specnb("--help")[1].count("\n") <= 40
    for command in ("generate", "bench", "sweep", "heads train", "divergence investigate"):
        usual, every = (
            len({*re.findall(r"--[a-z-]+ ", specnb(*command.split(), word)[1])})
            for word in ("--help", "--help-all")
        )
        assert usual - 1 <= 12 and every >= usual, command
