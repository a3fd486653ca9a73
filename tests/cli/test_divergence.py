"""`specnb divergence`, `check` of a pair, and the triage of `generate`."""

import json
import sys
from functools import partial

import pytest

from specnb.chapters.lossless import related, resampled_from_target
from specnb.divergence.faults import FAULTS
from specnb.divergence.sampling import STATISTICS
from specnb.errors import InputError
from specnb.lm import toy
from tests.conftest import errors
from tests.tiny_models import llama_gguf

SIZE = 300
SHORT = ("--tokens", "18", "--prompt-tokens", "14")
"""A short text, because each token fed costs time."""


@pytest.fixture
def investigate(specnb):
    return partial(specnb, "divergence", "investigate")


# --- investigate ----------------------------------------------------------------------------------


def test_a_sound_draft_is_exit_code_zero(investigate):
    code, out, _ = investigate(*SHORT, "--setups", "S0")
    assert code == 0 and out.startswith("SOUND: ") and "50 of 50 modules" in out


SERVICE = """
from contextlib import contextmanager
from specnb.divergence.faults import FAULTS

def deploy(draft, neighbour):
    print("so it may")
    return FAULTS["positional_registry"](draft, neighbour)

@contextmanager
def crashes(draft, neighbour):
    def forward(*args, **kwargs):
        raise ZeroDivisionError("in the kernel")
    draft.forward = forward
    yield
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Write modules to the current directory, and unload them afterwards."""
    (tmp_path / "my_service.py").write_text(SERVICE)
    (tmp_path / "broken.py").write_text("import my_service\nimport nothing_like_it\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("my_service", "broken"):
        sys.modules.pop(name, None)


def test_a_users_service_in_the_current_directory_is_used_and_may_print(investigate, service):
    code, out, err = investigate(
        *SHORT, "--deploy", "my_service:deploy", "--setups", "S2", "--json"
    )
    assert code == 1 and json.loads(out)["causes"][0]["cause"] == "IDENTITY" and "so it may" in err


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        ("--fault positional", 2, "did you mean positional_registry?"),
        ("--fault split_k --deploy a:b", 2, "'a:b'"),
        ("--setups S0,S9", 2, "'S9'"),
        ("--target smollm2-135m", 2, "smollm2-135m"),
        ("--prompt-tokens 32", 2, "--tokens"),
        ("--draft no-such-model --dtype foo", 2, "float32, bfloat16, float16"),
        ("--draft no-such-model", 125, "no-such-model"),
        ("--deploy nothing_like_it:deploy", 125, "ModuleNotFoundError"),
        # Python's own exit code would be 1, and `git bisect` would call every commit with a broken
        # build bad.
        ("--deploy my_service:crashes --setups S0", 125, "ZeroDivisionError: in the kernel"),
    ],
)
def test_invalid_options_and_failures_are_one_line_and_give_no_verdict(
    investigate, service, words, code, value
):
    got, out, err = investigate(*SHORT, *words.split())
    assert got == code and out == "" and [value in line for line in errors(err)] == [True]
    assert ("Traceback" in err) == ("crashes" in words)


def test_users_models_are_opened_in_torch(investigate, tiny, tmp_path, monkeypatch):
    """For a GGUF file, torch runs other code than llama.cpp; the command says so."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    draft = str(llama_gguf(tmp_path / "draft.gguf"))
    pair = ("--draft", draft, "--target", tiny)
    code, out, err = investigate(*SHORT, *pair, "--setups", "S0,S3", "--json")
    assert f"{draft} is dequantized and opened in torch here" in errors(err)[0]
    document = json.loads(out)
    assert code == 0 and document["verdict"] in ("SOUND", "PRECISION_ONLY"), err
    assert document["facts"]["draft"] == document["facts"]["target"] == "LlamaForCausalLM"
    assert [s["verdict"] for s in document["setups"]].count("clean") == 2


# --- check, audit, faults -------------------------------------------------------------------------


def test_a_pair_is_checked_and_a_failure_is_named(specnb, tiny, monkeypatch):
    code, out, _ = specnb("check", tiny, tiny, "--json")
    verdicts = {check["check"]: check["verdict"] for check in json.loads(out)}
    assert code == 0 and verdicts["purity"] == verdicts["recurrence"] == "ok"
    monkeypatch.setattr("specnb.compat.preflight.probe_rewind", lambda model: False)
    code, out, err = specnb("check", tiny, tiny)
    assert code == 1 and "fail" in out and "rejection" in out, err
    assert specnb("check", tiny, "lookup", tiny)[:2] == (2, "")


@pytest.fixture
def audit(specnb, open_with):
    """Run `specnb divergence audit` with toys that can encode the shipped prompts."""
    toys = dict(zip(("target", "draft"), related(0), strict=True))

    def load(name, **_options):
        if name not in toys:
            raise InputError(f"no model {name}")
        model = toy.ToyLM(toys[name]._logits_of, toys[name].vocab, name=name)
        model.encode = lambda text, special=True: [ord(letter) % 32 for letter in text[:8]]
        return model

    open_with(load)
    return partial(specnb, "divergence", "audit", "--target", "target")


def test_an_audit_is_sound_or_inconclusive_or_names_the_fault(audit, tmp_path):
    code, out, _ = audit("--draft", "draft", "--prompts", "10")
    assert code == 0 and out.startswith("sound: ") and all(name in out for name in STATISTICS)
    code, out, _ = audit("--draft", "draft", "--prompts", "1", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 125 and document["verdict"] == "inconclusive"
    assert document["more"] > 100
    file = tmp_path / "p.jsonl"
    file.write_text('{"task_id": 1, "prompt": "ab"}\n{"task_id": 2, "prompt": "ba"}')
    with resampled_from_target():
        code, out, _ = audit("--draft", "draft", "--prompts", str(file))
    assert code == 1 and out.startswith("wrong: token after a rejection")


def test_texts_of_another_engine_are_judged(specnb, monkeypatch, tmp_path):
    monkeypatch.setattr("specnb.lm.load.load", lambda name: toy.cyclic(5))
    file = tmp_path / "texts.jsonl"
    words = ("audit-text", str(file), "--target", "a", "--other", "b", "--json")
    for output, verdict, code in (([1, 2, 3], "identical", 0), ([1, 3, 4], "hard", 1)):
        file.write_text(json.dumps({"prompt": [0], "output": output}))
        got, out, _ = specnb("divergence", *words)
        assert (got, json.loads(out)["sources"][0]["verdict"]) == (code, verdict)


def test_every_planted_fault_is_listed_with_its_options(specnb):
    code, out, _ = specnb("divergence", "faults", "--json")
    rows = {row["fault"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == list(FAULTS)
    assert rows["expert_scale"]["options"]["eps"] == 0.02


# --- triage ---------------------------------------------------------------------------------------


@pytest.fixture
def generate(specnb, open_with):
    """Run `specnb generate` with toys: a target, an identical draft, and a different one."""
    seeds = {"target": 1, "same": 1, "other": 2}
    open_with(lambda name, **options: toy.markov(SIZE, order=3, seed=seeds[name]))
    words = "generate a --target target --k 4 --max-new-tokens 150 --ignore-eog"
    return partial(specnb, *words.split())


@pytest.mark.parametrize(
    "words", ["--draft other", "--draft same --baseline", "--drafter lookup", ""]
)
def test_a_draft_that_is_never_accepted_is_reported_in_one_line(generate, words):
    code, out, err = generate(*words.split(), "--json")
    triage = json.loads(out)["triage"]
    # about the machine, not the draft
    remarks = [line for line in errors(err) if "busy" not in line]
    expected = [f"specnb: {triage}"] if "other" in words else []
    assert code == 0 and remarks == expected and bool(triage) == bool(expected)
