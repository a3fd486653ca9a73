"""`specnb attach` against a server in this process, with planted faults and computed times."""

import json
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from specnb.batch import attach as servers
from specnb.batch.attach import attach, compare_builds, judge_replies
from specnb.errors import InputError, ServerError
from specnb.params import ServerParams
from specnb.prompts import prompts

CHOSEN = prompts("code", limit=5) + prompts("prose", limit=1)
STEP_MS, TOKEN_MS = 10.0, 1.5
"""Milliseconds per forward pass of the target, and per draft token in it."""


@dataclass
class Fake:
    """A server that drafts `k` tokens, each accepted with chance `alpha`; `fault` names a fault."""

    engine: str = "llamacpp"
    k: int = 4
    fault: str = ""
    alpha: float = 0.7
    step_ms: float = STEP_MS
    has_metrics: bool = True
    headers: list = field(default_factory=list)
    reached: Counter = field(default_factory=Counter)
    never: threading.Event = field(default_factory=threading.Event)
    rounds = drafted = n_requests = 0

    def reply(self, body):
        fixed = self.fault == "K ignored" or self.engine != "llamacpp"
        k = self.k if fixed else body.get("speculative.n_max", self.k)
        text = body["messages"][-1]["content"]
        rng = np.random.default_rng([len(text), int(10 * body["temperature"])])
        left = body["max_tokens"]
        drafted, accepted = [], []
        while left:
            drafted.append(min(k, left - 1))
            lucky = rng.random(drafted[-1]) < self.alpha
            accepted.append([*lucky, False].index(False))
            left -= accepted[-1] + 1
        passes = len(drafted)
        accepted = accepted[: passes - drafted.count(0)]  # the last pass has no room for a draft
        self.rounds += len(accepted)
        self.drafted += sum(drafted)
        self.reached.update(place for n in accepted for place in range(n))
        changed = " that drafting changed" if self.fault == "another text" and k else ""
        choice = {"message": {"role": "assistant", "content": f"to {len(text)}{changed}"}}
        reply = {"choices": [choice], "usage": {"completion_tokens": body["max_tokens"]}}
        if self.engine == "sglang":
            histogram = np.bincount(accepted, minlength=k + 1).tolist()
            meta = {"spec_accept_histogram": histogram, "spec_verify_ct": len(accepted)}
            choice["meta_info"] = meta
        if self.engine == "llamacpp":
            counts = {"draft_n": sum(drafted), "draft_n_accepted": sum(accepted)}
            times = {"predicted_ms": passes * self.step_ms + sum(drafted) * TOKEN_MS}
            reply["timings"] = times | (counts if sum(drafted) else {})
        return reply

    def metrics(self):
        name = f"{self.engine}:spec_decode_num"
        lines = [f"{name}_drafts_total {self.rounds}", f"{name}_draft_tokens_total {self.drafted}"]
        places = range(self.k)
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{position="{n}"}} {self.reached[n]}'
            for n in places
        ]
        return "\n".join(lines)

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            wbufsize = -1  # one packet per reply

            def log_message(self, *words):
                pass

            def send(self, text, status=200, **headers):
                self.send_response(status)
                for header in headers.items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self):
                fake.headers.append(dict(self.headers))
                models = {"data": [{"id": "model", "owned_by": fake.engine}]}
                pages = {"/v1/models": json.dumps(models), "/props": '{"build_info": "b1"}'}
                if fake.has_metrics:
                    pages["/metrics"] = fake.metrics()
                if fake.fault == "redirect":
                    self.send("", 302, Location="http://192.0.2.1/v1/models")
                else:
                    self.send(pages.get(self.path, "no"), 200 if self.path in pages else 404)

            def do_POST(self):
                fake.n_requests += 1
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if fake.fault == "stops" and fake.n_requests > 12:
                    fake.never.wait(5)
                elif fake.fault == "2 GB":
                    self.send("")
                    with suppress(OSError):  # the client closes the connection
                        for _ in range(2048):
                            self.wfile.write(b" " * (1 << 20))
                elif fake.fault == "another host":
                    self.send("", 307, Location="http://192.0.2.1/")
                elif fake.fault == "no JSON":
                    self.send("<html>")
                else:
                    self.send(json.dumps(fake.reply(body)))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        return self

    def __exit__(self, *error):
        self.never.set()
        self.http.shutdown()
        self.http.server_close()


def params_of(url, **options):
    return ServerParams(server=url, timeout_s=1.0, **options)


def run(fake, plain=None, **options):
    with fake, plain or nullcontext() as other:
        return attach(params_of(fake.url, plain=other.url if other else "", **options), CHOSEN)


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_a_sound_server_gets_costs_a_best_k_and_no_findings(engine):
    is_llama = engine == "llamacpp"
    document = run(Fake(engine, has_metrics=engine != "sglang"), None if is_llama else Fake(k=0))
    judged = judge_replies(document)
    assert document["error"] == "" and document["engine"] == engine
    findings = [finding["check"] for finding in judged["findings"]]
    # the others take K only at startup
    assert findings == ([] if is_llama else ["K ignored"])
    first = judged["contents"][0]
    assert first["content"] == "all" and first["n_prompts"] == 6 and 2 < first["tau"] < 3.5
    judgeable = [row["best_low"] > 0 for row in judged["contents"]]
    assert judgeable == [True, True, False] * 2, "one prompt has no interval"
    assert 1 <= first["best_k"] <= 4 and "Does speculation pay" in servers.draw_page(
        document | judged
    )
    if is_llama:
        assert judged["step_s"] == pytest.approx(STEP_MS / 1000, rel=0.02)
        assert judged["draft_token_s"] == pytest.approx(TOKEN_MS / 1000, rel=0.1)
        assert first["verdict"] == "pays" and first["identical"] == 6 and "build" in document
        assert f"n-max {first['best_k']}" in judged["option"]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ({"fault": "K ignored"}, "K ignored"),
        ({"alpha": 0.0}, "near zero"),
        ({"fault": "another text"}, "text differs"),
    ],
)
def test_planted_faults_are_found_by_name(fault, check):
    document = run(Fake(**fault), Fake(k=0) if check == "K ignored" else None)
    assert [finding["check"] for finding in judge_replies(document)["findings"]] == [check]


def test_missing_plain_replies_or_counts_give_no_verdict_or_no_best_k():
    judged = judge_replies(run(Fake(fault="K ignored")))
    assert judged["contents"][0]["verdict"] == "cannot know" and "--plain" in judged["line"]
    judged = judge_replies(run(Fake(has_metrics=False)))
    first = judged["contents"][0]
    assert first["verdict"] == "pays" and "best_k" not in first and judged["option"] == ""


@pytest.mark.parametrize(
    ("fault", "part"),
    [("stops", "timed out"), ("2 GB", "bytes"), ("another host", "307"), ("no JSON", "JSON")],
)
def test_a_failing_server_ends_the_run_and_completed_replies_are_kept(fault, part):
    fake = Fake(fault=fault)
    document = run(fake)
    assert part in document["error"] and len(document["runs"]) == (11 if fault == "stops" else 0)
    assert not document["runs"] or judge_replies(document)["contents"]


def test_an_address_without_a_supported_server_is_an_error():
    with Fake(fault="redirect") as fake, pytest.raises(ServerError, match="302"):
        attach(params_of(fake.url), CHOSEN)
    with Fake(engine="mine") as fake, pytest.raises(ServerError, match="llamacpp, vllm, sglang"):
        attach(params_of(fake.url), CHOSEN)
    with pytest.raises(ServerError, match="refused"):
        attach(params_of(fake.url), CHOSEN)
    for url in ("localhost:8080", "ftp://localhost", "http://localhost:port"):
        with pytest.raises(InputError, match=url):
            attach(params_of(url), CHOSEN)


@pytest.mark.parametrize("key", ["secret", "secret\nHost: elsewhere", "\N{SNOWMAN}secret"])
def test_the_key_is_sent_and_never_shown(monkeypatch, key):
    monkeypatch.setenv(servers.KEY, key)
    fake = Fake()
    try:
        shown = json.dumps(run(fake))
        assert fake.headers[0]["Authorization"] == f"Bearer {''.join(key.split())}"
    except ServerError as error:
        shown = str(error)
    assert "secret" not in shown


def test_the_change_between_two_builds_is_named_and_noise_is_none():
    old = run(Fake())
    moved = [
        reply | ({"sha256": "moved"} if at == 1 else {}) for at, reply in enumerate(old["runs"])
    ]
    changed = {
        "nothing": run(Fake()),
        "arithmetic": old | {"runs": moved},
        "drafting": run(Fake(alpha=0.6)),
        "cost": run(Fake(step_ms=1.3 * STEP_MS)),
        "cannot know": old | {"prompts_sha256": "of others"},
    }
    for verdict, new in changed.items():
        assert compare_builds(old, new).verdict == verdict
    assert compare_builds(old, old | {"runs": moved[:4]}).verdict == "cannot know"
    rng = np.random.default_rng(0)
    for _ in range(30):
        noisy = [r | {"seconds": r["seconds"] * rng.lognormal(0.03, 0.1)} for r in old["runs"]]
        assert compare_builds(old, old | {"runs": noisy}).verdict == "nothing"


def test_the_command_writes_page_and_fingerprint_and_compares_them(tmp_path, specnb):
    old, new = (tmp_path / "old.json", tmp_path / "new.json")

    def attached(fake, file, *words):
        with fake:
            options = ("--prompts-per-category", "1", "--timeout-s", "1", "--save", str(file))
            return specnb("attach", fake.url, *options, *words)

    def compared():
        return specnb("attach", "--compare", str(old), str(new))[:2]

    code, out, _ = attached(Fake(), old)
    assert code == 0 and "Verdict: pays" in out and "text differs" not in out
    assert "Does speculation pay" in old.with_suffix(".html").read_text()
    document = json.loads(attached(Fake(), new, "--json")[1])
    assert document == json.loads(new.read_text()) and compared()[0] == 0
    attached(Fake(alpha=0.5), new)
    code, out = compared()
    assert code == 1 and out.startswith("drafting: 12 replies moved")
    assert specnb("results", "--from", str(new))[0] == 0
    code, _, err = attached(Fake(fault="stops"), new)
    assert code == 1 and "timed out" in err and len(json.loads(new.read_text())["runs"]) == 11
    assert compared()[0] == 125
    for mistake in ("", "http://127.0.0.1:1", f"--compare {old} absent.json"):
        assert specnb("attach", *mistake.split())[0] == 2
