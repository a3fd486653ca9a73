"""`specnb divergence`, and the triage that `specnb generate` and a sweep call by themselves."""

import dataclasses
import json
import shlex
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from specnb.cli import divergence_checks as cli_divergence_checks
from specnb.divergence import report
from specnb.divergence.compare import compare
from specnb.divergence.deploy import imported
from specnb.divergence.faults import FAULTS
from specnb.divergence.trace import Trace
from specnb.divergence.walk import Doubt
from specnb.draft import translate as draft_translate
from specnb.draft.load import LoadedDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import ksweep, pair
from specnb.measure.triage import suspicions
from specnb.params import KSweepParams
from tests.tiny_models import torch_folder, torch_model

SIZE = 300
SHORT = ("--tokens", "18", "--prompt-tokens", "14")
"""What a run costs is its number of feeds; the length that the command has by itself is that of the first test."""


@pytest.fixture
def investigate(specnb):
    return lambda *words: specnb("divergence", "investigate", *words)


def told(err):
    """The line on stderr that is no progress bar's."""
    return next(line for line in err.replace("\r", "\n").splitlines() if line.startswith("specnb: "))


# --- investigate ----------------------------------------------------------------------------------------------------


def test_a_sound_draft_is_exit_code_zero(investigate):
    code, out, _ = investigate("--setups", "S0")
    assert code == 0 and out.startswith("SOUND: ") and "50 of 50 modules" in out and "Causes" not in out


def test_the_case_is_exit_code_one_and_names_module_and_cause(investigate):
    code, out, _ = investigate(*SHORT, "--setups", "S0,S1,S2", "--fault", "positional_registry")
    line = out.splitlines()[0]
    assert code == 1 and line.startswith("DIVERGENT: first at layers.0.mlp.experts,")
    assert "IDENTITY" in line and "S0 S1 clean; S2 wrong" in line
    assert "resolve modules by name" in out and "vLLM #33497" in out and "Does it repeat? Yes" in out


def test_json_is_one_document_with_the_verdict(investigate):
    words = ["--fault", "expert_scale", "--layer", "2", "--setups", "S0", "--dtype", "bfloat16", "--seed", "3"]
    code, out, _ = investigate(*SHORT, *words, "--json")
    document = json.loads(out)
    assert document["facts"]["tokens"] == 18 and document["facts"]["prompt"] == 14
    assert code == document["exit_code"] == 1 and out.count("\n") == 1
    assert document["verdict"] == "DIVERGENT" and document["facts"]["dtype"] == "bfloat16"
    assert document["first"]["module"] == "layers.2.mlp.experts" and document["causes"][0]["cause"] == "WEIGHTS"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--fault", "positional"], ["unknown fault 'positional'", "did you mean positional_registry?", "known: "]),
        (["--fault", "random_head", "--layer", "1"], ["random_head is in no one layer", "leave layer 1 out"]),
        (["--layer", "1"], ["add --fault NAME"]),
        (["--fault", "split_k", "--deploy", "a:b"], ["--deploy or --fault, not both", "'a:b' and 'split_k'"]),
        (["--setups", "S0,S9"], ["unknown set-up 'S9'", "known: S0, S0w, S1"]),
        (["--setups", ""], ["unknown set-up ''"]),
        (["--target", "smollm2-135m"], ["the embedded pair has its own target", "smollm2-135m"]),
        (["--prompt-tokens", "32"], ["--prompt-tokens is 32", "--tokens", "32"]),
        (["--dtype", "float8"], ["--dtype float8", "float32, bfloat16"]),
        (["--draft", "no-such-model", "--dtype", "foo"], ["--dtype foo", "float32, bfloat16, float16"]),
        (["--draft", "no-such-model", "--setups", "S0,S3"], ["--setups S0,S3", "S3", "add --target"]),
        (["--features", "graphs"], ["--features graphs", "add --deploy"]),
        (["--fault", "split_k", "--features", "graphs"], ["--features graphs", "add --deploy"]),
        (["--fault", "expert_scale", "--layer", "9"], ["layer 9 has no bank of experts"]),
    ],
    ids=lambda x: " ".join(x)[:40],
)
def test_wrong_words_are_one_line_and_exit_code_two(investigate, words, parts):
    code, out, err = investigate(*words)
    assert code == 2 and out == "" and err.startswith("specnb: ") and err.count("\n") == 1, err
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    ("option", "value"), [("tokens", "1"), ("prompt-tokens", "0"), ("k", "0"), ("seed", "-1"), ("seed", str(2**63))]
)
def test_numbers_out_of_range_are_exit_code_two(investigate, option, value):
    code, out, err = investigate(f"--{option}", value)
    assert code == 2 and out == "" and f"--{option}" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--draft", "no-such-model"], "no-such-model"),
        (["--draft", "./no-such-folder", "--target", "pair"], "no-such-folder"),
    ],
)
def test_what_cannot_be_judged_is_no_verdict(investigate, words, part):
    code, out, err = investigate(*SHORT, *words)
    assert code == 125 and out == "" and part in told(err) and "Traceback" not in err


SERVICE = """
from contextlib import contextmanager
from specnb.divergence.faults import FAULTS
print("a service may print")
number = 3

def deploy(draft, neighbour):
    print("so it may")
    return FAULTS["positional_registry"](draft, neighbour)

@contextmanager
def sound(draft, neighbour):
    yield

def once(draft, neighbour):
    yield

@contextmanager
def raises(draft, neighbour):
    if neighbour is not None:
        raise KeyError("slot 17")
    yield

@contextmanager
def crashes(draft, neighbour):
    def forward(*args, **kwargs):
        raise ZeroDivisionError("in the kernel")
    kept, draft.forward = draft.forward, forward
    try:
        yield
    finally:
        del draft.forward
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """`my_service.py` in the current directory, forgotten afterwards."""
    (tmp_path / "my_service.py").write_text(SERVICE)
    (tmp_path / "broken.py").write_text("import my_service\nimport nothing_like_it\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_service", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("my_service", "broken"):
        sys.modules.pop(name, None)


def test_a_service_of_the_users_is_found_in_the_current_directory(investigate, service):
    code, out, err = investigate(*SHORT, "--deploy", "my_service:deploy", "--setups", "S2", "--json")
    assert code == 1 and json.loads(out)["causes"][0]["cause"] == "IDENTITY"
    assert "a service may print" in err and "so it may" in err


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("my_service", ["'my_service' names no function", "my_service:deploy"]),
        ("my service:deploy", ["names no function"]),
        ("nothing_like_it:deploy", ["importing nothing_like_it raised ModuleNotFoundError"]),
        ("broken:deploy", ["importing broken raised ModuleNotFoundError", "nothing_like_it", "(broken.py, line 2)"]),
        ("my_service:deploi", ["no 'deploi' in the module my_service", "did you mean deploy"]),
        ("my_service:number", ["my_service:number is a int, not a function"]),
        ("my_service:once", ["gave a generator, not a context manager", "contextlib.contextmanager"]),
        (
            "my_service:raises",
            ["my_service:raises(draft, neighbour) raised KeyError: 'slot 17'", "(my_service.py, line"],
        ),
    ],
)
def test_a_service_that_does_not_start_says_why_and_where(service, name, parts):
    with pytest.raises(InputError) as failed, imported(name)(object(), object()):
        pass
    assert all(part in str(failed.value) for part in parts)


def test_a_service_that_does_not_start_is_one_line_and_no_verdict(investigate, service):
    code, out, err = investigate("--deploy", "nothing_like_it:deploy")
    assert code == 125 and out == "" and "Traceback" not in err and "ModuleNotFoundError" in told(err)


def test_features_that_a_service_cannot_leave_out_are_wrong_words(investigate, service):
    code, out, err = investigate("--deploy", "my_service:deploy", "--features", "graphs")
    assert code == 2 and out == "" and "Traceback" not in err
    assert told(err).startswith("specnb: the service deploy cannot leave features out")


def test_a_service_that_crashes_in_a_forward_shows_where_and_is_no_verdict(investigate, service):
    """Python's own exit code for it is 1: git would take every commit of a broken build for the bad one."""
    code, out, err = investigate(*SHORT, "--deploy", "my_service:crashes", "--setups", "S0")
    assert code == 125 and out == ""
    assert "Traceback" in err and "my_service.py" in err
    assert told(err) == "specnb: nothing was judged: ZeroDivisionError: in the kernel"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(torch_folder(tmp_path_factory.mktemp("tiny") / "draft"))


def test_models_of_the_users_are_opened_in_torch(investigate, tiny):
    code, out, err = investigate(*SHORT, "--draft", tiny, "--target", tiny, "--setups", "S0,S3", "--json")
    document = json.loads(out)
    assert code == 0 and document["verdict"] in ("SOUND", "PRECISION_ONLY"), err
    assert document["facts"]["draft"] == document["facts"]["target"] == "LlamaForCausalLM"
    assert {s["setup"] for s in document["setups"] if s["verdict"] == "clean"} == {"S0", "S3"}


def test_a_report_holds_the_verdict_and_a_reproduction(investigate, tiny, tmp_path):
    words = [*SHORT, "--draft", tiny, "--dtype", "bfloat16", "--fault", "random_head", "--setups", "S0", "--json"]
    code, out, err = investigate(*words, "--report", str(tmp_path / "report"))
    document = json.loads(out)
    assert code == 1 and document["causes"][0]["cause"] == "HEAD" and "report.html" in told(err)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["line"] == document["line"]
    assert "import" in (tmp_path / "report" / "repro" / "repro.py").read_text()


def test_what_is_printed_is_what_the_report_says(investigate, tmp_path):
    code, out, _ = investigate(*SHORT, "--setups", "S0", "--report", str(tmp_path))
    assert code == 0 and (tmp_path / "report.txt").read_text() == out.removesuffix("\n")
    assert "controls were called divergent" in out


def test_the_slots_of_the_case_are_in_the_report_of_the_pair_only(investigate, tiny, tmp_path):
    for name, words in (("pair", []), ("tiny", ["--draft", tiny])):
        assert investigate(*SHORT, *words, "--setups", "S0", "--report", str(tmp_path / name), "--json")[0] == 0
    pair, other = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("pair", "tiny"))
    assert 336 in [row["first_slot"] for row in pair["slots"]] and "slots" not in other


def test_a_score_that_is_not_there_keeps_the_verdict(investigate, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "project_dir", lambda: tmp_path)
    code, out, _ = investigate(*SHORT, "--setups", "S0")
    assert code == 0 and "Not known here" in out


def test_a_report_that_cannot_be_written_keeps_the_verdict(investigate, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = investigate(
        *SHORT, "--draft", tiny, "--setups", "S0", "--report", str(tmp_path / "file" / "in"), "--json"
    )
    assert code == 0 and json.loads(out)["exit_code"] == 0 and "report.json" in told(err)


# --- compare, preflight, faults ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Traces of a tiny model: two alike, one with a random head."""
    from specnb.divergence.capture import capture
    from specnb.divergence.faults import FAULTS
    from specnb.divergence.investigate import made_up
    from specnb.divergence.script import run

    model, folder = torch_model().eval(), tmp_path_factory.mktemp("traces")
    script = made_up(model, tokens=18, prompt=14)
    for name, service in (("a", nullcontext()), ("b", nullcontext()), ("wrong", FAULTS["random_head"](model))):
        with service, capture(model) as builder:
            run(model, script)
        builder.trace().save(folder / name)
    return folder


def test_traces_are_compared_by_their_folders(specnb, traces):
    a, b, wrong = (str(traces / name) for name in ("a", "b", "wrong"))
    code, out, _ = specnb("divergence", "compare", a, b)
    assert code == 0 and out.startswith("SOUND: ") and "looked at: " in out
    code, out, _ = specnb("divergence", "compare", a, wrong, "--sound", b)
    assert code == 1 and out.startswith("DIVERGENT: first at lm_head") and "changed" in out
    code, out, _ = specnb("divergence", "compare", a, wrong, "--json")
    assert code == 1 and json.loads(out)["first"]["module"] == "lm_head"
    code, out, err = specnb("divergence", "compare", a, str(traces / "none"))
    assert code == 125 and out == "" and "none" in told(err)


@pytest.fixture(scope="module")
def engine(traces):
    """The wrong run as an engine writes it that holds the model inside another one."""
    trace = Trace.load(traces / "wrong")
    tensors, params = (t.assign(module="engine." + t["module"]) for t in (trace.tensors, trace.params))
    Trace(trace.facts, tensors, params, trace.arrays).save(traces / "engine")
    return str(traces / "engine")


def test_modules_of_an_engine_are_renamed_for_the_comparison(specnb, traces, engine):
    code, out, err = specnb("divergence", "compare", str(traces / "a"), engine)
    assert code == 125 and "--rename OLD=NEW" in told(err)
    for words in (["--rename", r"^engine\.="], ["--rename", "^engin=x", "--rename", r"^xe\.(?=.*)="]):
        code, out, err = specnb("divergence", "compare", str(traces / "a"), engine, *words)
        assert code == 1 and out.startswith("DIVERGENT: first at lm_head"), err


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("engine", "--rename engine: write OLD=NEW"),
        ("=x", "--rename =x: write OLD=NEW"),
        ("(=x", "rename '(' to 'x' does not work"),
        ("a=\\9", "does not work"),
    ],
)
def test_a_renaming_that_is_none_is_wrong_words(specnb, traces, word, part):
    code, out, err = specnb("divergence", "compare", str(traces / "a"), str(traces / "b"), "--rename", word)
    assert code == 2 and out == "" and part in told(err)


def test_what_was_found_is_captured_in_full_by_the_commands_that_come_next(specnb, traces, tiny, tmp_path):
    a, wrong = str(traces / "a"), str(traces / "wrong")
    code, out, _ = specnb("divergence", "compare", a, wrong)
    lines = [shlex.split(line.removeprefix("next: ")) for line in out.splitlines() if line.startswith("next: ")]
    assert code == 1 and [line[line.index("--tokens") + 1] for line in lines] == [a, wrong]
    made = {"REFERENCE-MODEL": tiny, "REFERENCE-IN-FULL": str(tmp_path / "full")}
    code, out, err = specnb(*(made.get(word, word) for word in lines[0][1:]))
    assert code == 0, err
    code, out, _ = specnb("divergence", "compare", a, str(tmp_path / "full"), "--json")
    assert code == 0 and json.loads(out)["next"] == []
    assert Trace.load(tmp_path / "full").tensors.query("module == 'lm_head'")["row"].ge(0).all()


def test_an_engine_that_cannot_be_opened_here_has_no_next_command(specnb, traces, tmp_path):
    for name in ("a", "wrong"):
        trace = Trace.load(traces / name)
        dataclasses.replace(trace, facts=trace.facts | {"engine": "vllm"}).save(tmp_path / name)
    code, out, err = specnb("divergence", "compare", str(tmp_path / "a"), str(tmp_path / "wrong"))
    assert code == 1 and out.startswith("DIVERGENT") and "next:" not in out and err == ""


def test_what_is_doubtful_is_captured_in_full_too(traces):
    both = {traces / name: Trace.load(traces / name) for name in ("a", "b")}
    sound = compare(*both.values())
    assert cli_divergence_checks._closer(sound, both) == []
    doubtful = dataclasses.replace(sound, doubts=(Doubt("lm_head", 7, 1),))
    assert ["lm_head" in command for command in cli_divergence_checks._closer(doubtful, both)] == [True, True]


def test_comparing_needs_no_torch(traces):
    words = ["divergence", "compare", str(traces / "a"), str(traces / "b")]
    code = f"""
import sys
from specnb.cli import main
sys.argv = ["specnb", *{words!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(sorted({{"torch", "transformers", "llama_cpp"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_a_preflight_fails_with_what_is_wrong(specnb, tiny, tmp_path):
    code, out, _ = specnb("divergence", "preflight", "--draft", tiny, "--target", tiny, "--json")
    found = {one["check"]: one["verdict"] for one in json.loads(out)}
    assert code == 0 and found["load report"] == found["recurrence"] == found["rope"] == "ok"
    (tmp_path / "training.json").write_text("{")
    code, out, _ = specnb("divergence", "preflight", "--draft", tiny, "--training", str(tmp_path))
    assert code == 1 and "fail" in out and "learning rate" in out
    assert specnb("divergence", "preflight", "--draft", tiny, "--training", str(tmp_path / "none"))[0] == 2


def test_a_drafter_without_a_model_needs_a_target_for_its_preflight(specnb):
    code, out, err = specnb("divergence", "preflight", "--draft", "lookup")
    assert code == 2 and out == "" and "add --target" in err


def test_files_of_a_hub_model_are_those_that_were_fetched(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **more: asked.update(more, a=a) or tmp_path)
    assert cli_divergence_checks._folder("hf:org/name?revision=v1") == tmp_path
    assert asked == {"a": ("org/name",), "revision": "v1", "local_files_only": True}
    assert cli_divergence_checks._folder("smollm2-135m") is None and cli_divergence_checks._folder("lookup") is None


def test_every_planted_fault_is_listed_with_its_options(specnb):
    code, out, _ = specnb("divergence", "faults", "--json")
    rows = {row["fault"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == list(FAULTS)
    case = rows["positional_registry"]
    assert case["cause"] == "IDENTITY" and case["first"] == "layers.0.mlp.experts" and "vllm#33497" in case["issues"]
    assert rows["expert_scale"]["options"]["eps"] == 0.02 and rows["uniform_offset"]["first"] is None


# --- triage by itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch):
    """Toys: a target, a drafter that is the target, and one of other rules."""
    made = {"target": (SIZE, 1), "same": (SIZE, 1), "other": (SIZE, 2)}

    def load(name, **options):
        size, seed = made[name]
        return toy.markov(size, order=3, seed=seed)

    monkeypatch.setattr(pair, "load", load)
    monkeypatch.setattr(draft_translate, "load", load)


def generated(specnb, *words):
    more = ["--target", "target", "--prompt", "", "--max-new-tokens", "150", "--ignore-eog"]
    return specnb("generate", *more, *words)


def test_a_draft_that_is_never_kept_is_told_in_one_line(specnb, models):
    code, out, err = generated(specnb, "--draft", "other", "--json")
    document = json.loads(out)
    assert code == 0 and err.count("\n") == 1 and err.startswith("specnb: suspicious acceptance: ")
    assert document["triage"] in err and "first drafts kept" in document["triage"]
    code, out, err = generated(specnb, "--draft", "other")
    assert code == 0 and "suspicious" in err and "suspicious" not in out


@pytest.mark.parametrize("words", [["--draft", "same"], ["--drafter", "lookup"], [], ["--draft", "same", "--baseline"]])
def test_a_sound_drafter_is_not_remarked_upon(specnb, models, words):
    code, out, err = generated(specnb, *words, "--json")
    assert code == 0 and err == "" and json.loads(out)["triage"] is None


def test_a_text_that_leaves_plain_decoding_is_told(specnb, models, monkeypatch):
    """The target answers blocks otherwise than single steps, and by more than rounding."""
    plain = toy.ToyLM.forward

    def forward(self, ids, n_logits=None):
        rows = plain(self, ids, n_logits)
        return np.roll(rows, 7, axis=1) if len(ids) > 1 and self.n_past > 40 else rows

    monkeypatch.setattr(toy.ToyLM, "forward", forward)
    code, out, err = generated(specnb, "--draft", "same", "--baseline", "--json")
    document = json.loads(out)
    assert code == 0 and document["summary"]["identical"] is False and not document["summary"]["fork"]["near_tie"]
    assert "plain decoding" in document["triage"] and document["triage"] in err


def test_a_sweep_names_the_drafter_that_is_suspicious(monkeypatch):
    class Reading(toy.ToyLM):
        def encode(self, text, *, special=True):
            return [b % self.vocab.size for b in text.encode()]

    def opened(seed):
        model = toy.markov(SIZE, order=3, seed=seed)
        model.__class__ = Reading
        return model

    params = KSweepParams(
        ks=[1, 4], k_max=4, temperatures=[0.0], categories=["code"], prompts_per_category=3, max_new_tokens=40,
        conversations=0,
    )  # fmt: skip
    monkeypatch.setattr(ksweep, "load", lambda *_, **__: opened(1))
    for seed, n_lines in ((1, 0), (2, 1)):
        drafter = ModelDrafter(opened(seed))
        drafter.name = "draft"
        monkeypatch.setattr(ksweep, "load_drafter", lambda *_, drafter=drafter, **__: LoadedDrafter(drafter))
        record = ksweep.run(params)
        lines = suspicions(record)
        assert len(lines) == n_lines and all(line.startswith("draft: suspicious acceptance: ") for line in lines)
    old = record.model_copy(update={"provenance": record.provenance | {"extra": {}}})
    with pytest.raises(InputError, match="run it again"):
        suspicions(old)


@pytest.mark.slow
def test_git_narrows_down_the_commit_that_broke_a_service(tmp_path):
    """The commit before it does not start and is skipped, so it stays a candidate; a verdict it would not be."""

    def git(*words, code=0):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *author, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    git("init", "-q")
    commits = {}
    for name, serve in {"old": "sound", "good": "sound", "dead": "raises", "bad": "deploy", "new": "deploy"}.items():
        (tmp_path / "my_service.py").write_text(f"{SERVICE}\nserve = {serve}  # {name}\n")
        git("add", "my_service.py")
        git("commit", "-q", "-m", name)
        commits[name] = git("rev-parse", "HEAD").strip()
    git("bisect", "start", commits["new"], commits["old"])
    judge = [sys.executable, "-c", "from specnb.cli import main; main()", "divergence", "investigate"]
    said = git("bisect", "run", *judge, "--deploy", "my_service:serve", "--setups", "S0,S2", code=2)
    candidates = said.split("The first bad commit could be any of:")[1]
    assert {name for name, commit in commits.items() if commit in candidates} == {"dead", "bad"}
