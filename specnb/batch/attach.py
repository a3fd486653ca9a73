"""Attach to a running server: does speculation pay, at which K, and is its text the target's?

Prompts are sent one at a time, at temperatures 0 and 1, alternating with plain decoding: by the
same server with K = 0 if requests can set K, else by a second server without a draft. The rounds
come from the reply itself or from the server's counters before and after it; they predict every
smaller K (`batch.logs`). Plain replies give T(1). The others give the time that a draft token adds
to a round: its draft step plus the slope of T(n). Whole replies cannot separate the two, and the
choice of K does not require it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPSConnection
from itertools import product
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
from jinja2 import Environment

from specnb.batch.logs import (
    COUNTERS,
    Request,
    advise,
    counts_in,
    describe_fault,
    find_faults,
    read_counters,
    read_counts,
    sweep_log,
)
from specnb.decode.generate import prompt_ids
from specnb.divergence.foreign import ForeignText, audit_texts
from specnb.errors import ServerError, SpecnbError
from specnb.findings import Finding
from specnb.io import JsonObject, digest, plain, project_dir, read_json, reading
from specnb.lm.load import load
from specnb.measure.bench import Timed, tabulate_speeds
from specnb.measure.cost import Cost
from specnb.measure.experiment import Experiment, Progress, first_of_each, silent
from specnb.measure.intervals import FEWEST, interval, pays, rate_ratio
from specnb.params import ServerParams
from specnb.prompts import Prompt, digest_prompts, prompts
from specnb.records import RunRecord

KEY = "SPECNB_API_KEY"
"""Environment variable with an API key, which is sent to the server and never printed."""
MAX_REPLY = 16 << 20
TEMPERATURES = (0.0, 1.0)
PLAIN = "plain"
DRAFTED = "drafted"
SECOND_K = 2
"""A second K whose cost is measured if requests can set K."""
ENGINES = {
    "llamacpp": ("/props", "build_info", "--spec-draft-n-max {}"),
    "vllm": ("/version", "version", '"num_speculative_tokens": {} in --speculative-config'),
    "sglang": ("/server_info", "version", "--speculative-num-steps {}"),
}
"""Engines by their name in /v1/models: path and field of the build, and the option for K."""
RECORDING = project_dir() / "data" / "servers" / "xllamacpp.json"
MOVED = 1.15
"""Ratio of two builds' times that the machine's drift cannot explain."""
EXIT_CODES = {"nothing": 0, "arithmetic": 1, "drafting": 1, "cost": 1, "cannot know": 125}
"""Exit codes by what changed between two builds."""


@contextmanager
def reaching(place: str) -> Iterator[None]:
    """Convert connection errors, and errors of malformed replies, to a ServerError."""
    try:
        yield
    except ServerError:
        raise
    except Exception as error:  # a server can send anything
        raise ServerError(f"{place}: {type(error).__name__}: {error!s:.200}") from error


class Server:
    """A running server. Only its URL is contacted; redirects and long replies are rejected."""

    def __init__(self, url: str, timeout_s: float) -> None:
        with reading(f"the URL {url!r} (expected one such as http://localhost:8080)"):
            self.url = urlsplit(url)
            self.connect = {"http": HTTPConnection, "https": HTTPSConnection}[self.url.scheme]
            self.place = f"{self.url.hostname}:{self.url.port or self.url.scheme}"
        self.timeout_s = timeout_s

    def ask(self, path: str, body: JsonObject | None = None) -> str:
        """Return the reply to a GET, or to a POST of `body`. Raises ServerError."""
        key = "".join(os.environ.get(KEY, "").split())  # a line break would make an error quote it
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        deadline_s = perf_counter() + self.timeout_s
        data = bytearray()
        with (
            reaching(f"{self.place}{path}"),
            closing(
                self.connect(self.url.hostname, self.url.port, timeout=self.timeout_s)
            ) as connection,
        ):
            path = self.url.path.rstrip("/") + path
            connection.request("POST" if body else "GET", path, body and json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(
                    f"status {reply.status} {reply.reason}, expected 200; "
                    "redirects are not followed"
                )
            while chunk := reply.read1(1 << 16):
                data += chunk
                if len(data) > MAX_REPLY or perf_counter() > deadline_s:
                    raise ValueError(
                        f"{len(data)} bytes so far, "
                        f"expected at most {MAX_REPLY} in {self.timeout_s:g} s"
                    )
            return data.decode()

    def metrics(self) -> str:
        """Return the text of /metrics; "" if the server has none."""
        with suppress(ServerError):
            return self.ask("/metrics")
        return ""

    def identify(self) -> dict[str, str]:
        """Return engine, model and build. Raises ServerError."""
        with reaching(f"{self.place}/v1/models (expected {', '.join(ENGINES)})"):
            model = json.loads(self.ask("/v1/models"))["data"][0]
            path, field, _ = ENGINES[model["owned_by"]]
            facts = {"engine": model["owned_by"], "model": model["id"], "build": "unknown build"}
            with suppress(ServerError):
                build = str(json.loads(self.ask(path)).get(field))
                facts["build"] = build.replace("b0-unknown", facts["build"])  # llama.cpp's default
            return facts

    def measure(
        self, prompt: Prompt, k: int | None, settings: JsonObject
    ) -> tuple[JsonObject, str]:
        """Send a prompt; return the reply's counts and time, and its text. Raises ServerError."""
        messages = [message.model_dump() for message in prompt.messages or ()]
        body: JsonObject = {
            "messages": messages or [{"role": "user", "content": prompt.text}],
            "seed": 0,
            "cache_prompt": False,
            "return_meta_info": True,
            **settings,
        }
        if k is not None:
            body["speculative.n_max"] = k
        with reaching(f"{self.place}, prompt {prompt.id}"):
            before = self.metrics()
            start_s = perf_counter()
            reply = json.loads(self.ask("/v1/chat/completions", body))
            wall_s = perf_counter() - start_s
            after = self.metrics()
            counts = (
                read_counters(after, before)
                if COUNTERS.search(after)
                else next(counts_in(reply), {})
            )
            message = reply["choices"][0]["message"]
            has_rounds = counts and "draft_n_accepted" not in counts
            accepted, drafted = (
                read_counts(counts, None, prompt.id) if has_rounds else Request((), ())
            )
            row = {
                "n_tokens": int(reply["usage"]["completion_tokens"]),
                "seconds": float(reply.get("timings", {}).get("predicted_ms", 1000 * wall_s))
                / 1000,
                "sha256": digest(message),
                "drafted": int(counts.get("draft_n", sum(drafted))),
                "accepted": int(counts.get("draft_n_accepted", sum(accepted))),
                "acceptance_histogram": np.bincount(accepted).tolist(),
                "num_spec_tokens": max(drafted, default=0),
            }
            return row, message["content"]


def attach(
    params: ServerParams, chosen: Sequence[Prompt], progress: Progress = silent
) -> JsonObject:
    """Run prompts on a server, and return the measurements, a fingerprint of its build.

    If a run ends early, `error` gives the reason, and the replies so far are included. Raises
    InputError for an invalid URL, and ServerError for a server that cannot be identified.
    """
    server = Server(params.server, params.timeout_s)
    document: JsonObject = {
        "server": server.place,
        **server.identify(),
        "prompts_sha256": digest_prompts(chosen),
        "max_new_tokens": params.max_new_tokens,
        "runs": [],
        "drafted_at_0": 0,
        "audit": None,
        "error": "",
    }
    settings = {"model": document["model"], "max_tokens": params.max_new_tokens, "temperature": 0.0}
    texts = []
    try:
        # 1. Does the server honor K = 0? This is also the warm-up.
        row, _ = server.measure(chosen[0], 0, settings)
        document["drafted_at_0"] = row["drafted"]
        ways = {DRAFTED: (server, None)}
        if params.plain:
            ways[PLAIN] = (Server(params.plain, params.timeout_s), None)
        elif not row["drafted"]:
            ways |= {PLAIN: (server, 0), f"K = {SECOND_K}": (server, SECOND_K)}
        # 2. Run the prompts in every way, alternating.
        jobs = list(product(TEMPERATURES, chosen, ways))
        for done, (temperature, prompt, way) in enumerate(jobs):
            progress(done, len(jobs), f"{prompt.id}, T = {temperature:g}, {way}")
            where, k = ways[way]
            row, text = where.measure(prompt, k, settings | {"temperature": temperature})
            place = {"prompt": prompt.id, "category": prompt.category}
            document["runs"].append(place | {"temperature": temperature, "way": way} | row)
            if not temperature:
                texts.append((prompt, way, text))
        # 3. Compare the greedy texts with the target's own.
        if params.target:
            with closing(load(params.target)) as model:
                foreign = [
                    ForeignText(
                        id=prompt.id,
                        source=way,
                        control=PLAIN,
                        prompt=prompt_ids(model, prompt),
                        output=text,
                    )
                    for prompt, way, text in texts
                ]
                document["audit"] = audit_texts(model, foreign, progress=progress).document()
    except SpecnbError as error:
        document["error"] = str(error)
    return document


def run_server(params: ServerParams, *, progress: Progress = silent) -> RunRecord:
    """Attach to the server in `params`, or read the shipped recording; judge the measurements."""
    chosen = first_of_each(prompts(source=params.prompts), params.prompts_per_category)
    study = Experiment("10_your_server", params, chosen)
    study.measured = attach(params, chosen, progress) if params.server else read_json(RECORDING)
    study.models = [{"role": "target", "id": study.measured["model"], "sha256": None}]
    if study.measured["runs"]:
        study.measured = plain(study.measured | judge_replies(study.measured), nan=None)
    return study.record()


# --- judging the replies ---


def judge_replies(document: JsonObject) -> JsonObject:
    """Return the verdict, a table by content, the findings, and the option for the best K."""
    runs = pd.DataFrame(document["runs"])
    times = fit_times(runs)
    cost = Cost.straight("server", 1 + 7 * times[1] / times[0]) if times else None
    rows = []
    for temperature, part in runs.groupby("temperature"):
        contents = {"all": part} | dict(iter(part.groupby("category", sort=False)))
        rows += [
            {"content": name, "temperature": temperature} | _judge_part(of, cost)
            for name, of in contents.items()
        ]
    first = rows[0]
    line = "Whether speculation pays cannot be known without plain replies: give --plain."
    option = ""
    if cost:
        ends = f"no interval below {FEWEST} prompts"
        if first["n_prompts"] >= FEWEST:
            ends = f"95 % CI {first['low']:.2f} to {first['high']:.2f}"
        line = (
            f"Verdict: {first['verdict']}. Drafting is {first['speedup']:.2f} times as fast as "
            f"plain decoding, greedy ({ends})."
        )
    if "best_k" in first:
        option = ENGINES[document["engine"]][-1].format(first["best_k"])
        option = option if first["predicted"] > 1 else "leave drafting off"
    return {
        "line": line,
        "option": option,
        "step_s": times and times[0],
        "draft_token_s": times and times[1],
        "findings": _find_faults(document, runs, first),
        "contents": rows,
    }


def fit_times(runs: pd.DataFrame) -> tuple[float, float] | None:
    """Return T(1) and the seconds that a draft token adds, by least squares.

    None without plain replies or without draft tokens, and if noise makes T(1) negative.
    """
    if not (runs["way"] == PLAIN).any() or not runs["drafted"].any():
        return None
    passes = runs["n_tokens"] - runs["accepted"]
    (step_s, token_s), *_ = np.linalg.lstsq(np.stack([passes, runs["drafted"]], 1), runs["seconds"])
    return (step_s, max(0.0, token_s)) if step_s > 0 else None


def requests_of(runs: pd.DataFrame) -> list[Request]:
    """Return the rounds of the replies with the server's own K, if they are known."""
    replies = runs[runs["way"] == DRAFTED].to_dict("records")
    return [read_counts(run, None, run["prompt"]) for run in replies if run["num_spec_tokens"]]


def _judge_part(runs: pd.DataFrame, cost: Cost | None) -> JsonObject:
    """Return counts and speed of some replies, and the best K up to the server's own."""
    drafted = runs[runs["way"] == DRAFTED]
    tokens = drafted[["n_tokens", "accepted", "drafted"]].sum()
    row = {
        "n_prompts": len(drafted),
        "tau": tokens["n_tokens"] / (tokens["n_tokens"] - tokens["accepted"]),
        "acceptance_rate": tokens["accepted"] / tokens["drafted"],
        "verdict": "cannot know",
    }
    if not cost or PLAIN not in {*runs["way"]}:
        return row
    timed = [
        Timed(run.way, run.prompt, 0, run.n_tokens, run.seconds, (run.sha256,), None)
        for run in runs.itertuples()
    ]
    speed = tabulate_speeds(timed, baseline=PLAIN).set_index("method").loc[DRAFTED]
    row |= speed[["speedup", "low", "high", "identical"]].to_dict() | {
        "verdict": pays(speed["low"], speed["high"])
    }
    if requests := requests_of(runs):
        best = advise(
            sweep_log(requests, [cost], max(max(request.drafted) for request in requests))
        )
        row |= {
            "best_k": best["k"],
            "predicted": best["speedup"],
            "best_low": best["low"],
            "best_high": best["high"],
        }
    return row


def _find_faults(
    document: JsonObject, runs: pd.DataFrame, greedy: JsonObject
) -> list[dict[str, str]]:
    """Return suspected faults; `greedy` is the row of all greedy replies."""
    requests = requests_of(runs[runs["temperature"] == 0])
    faults = find_faults(requests) if requests else []
    if drafted := document["drafted_at_0"]:
        faults.append(
            describe_fault("K ignored", f"K = 0 was requested, and {drafted} tokens were drafted")
        )
    differ = greedy["n_prompts"] - greedy.get("identical", greedy["n_prompts"])
    audit = document["audit"] or {
        "line": "near-ties? give --target",
        "sources": [{"verdict": "hard"}],
    }
    if differ and any(source["verdict"] == "hard" for source in audit["sources"]):
        evidence = f"{differ} greedy texts differ from plain decoding ({audit['line']})"
        faults.append(describe_fault("text differs", evidence))
    return faults


def draw_page(document: JsonObject) -> str:
    """Return the HTML page of a run and its verdict."""
    template = Path(__file__).with_suffix(".html").read_text("utf-8")
    return Environment(autoescape=True).from_string(template).render(document)


def compare_builds(old: JsonObject, new: JsonObject) -> Finding:
    """Return what changed between two fingerprints; the verdict is a key of EXIT_CODES.

    arithmetic: a greedy text of plain decoding (any greedy text, if there are no plain replies).
    drafting: another greedy text, or the counts. cost: the interval of the ratio of speeds lies
    beyond MOVED.
    """
    old_runs, new_runs = (
        pd.DataFrame(build["runs"]).query("temperature == 0") for build in (old, new)
    )
    both = old_runs.merge(new_runs, on=["prompt", "way"], suffixes=("", "_new"))
    comparable = all(old[name] == new[name] for name in ("prompts_sha256", "max_new_tokens"))
    if not comparable or old["error"] or new["error"] or len(both) < FEWEST:
        return Finding(
            "builds",
            "cannot know",
            f"{len(both)} replies in common, expected {FEWEST} to the same prompts",
        )
    text, *counts = (
        both[name] != both[f"{name}_new"] for name in ("sha256", "drafted", "accepted")
    )
    of_plain = both["way"] == (PLAIN if PLAIN in {*both["way"]} else DRAFTED)
    for kind, moved in {
        "arithmetic": text & of_plain,
        "drafting": text | counts[0] | counts[1],
    }.items():
        if moved.any():
            return Finding(
                "builds", kind, f"{moved.sum()} replies moved: {', '.join(both['prompt'][moved])}"
            )
    for way, rows in both.groupby("way"):
        ratio = interval(rows[["n_tokens", "seconds_new", "n_tokens", "seconds"]], rate_ratio)
        if ratio.low > MOVED or ratio.high < 1 / MOVED:
            ends = f"95 % CI {ratio.low:.2f} to {ratio.high:.2f}"
            return Finding(
                "builds",
                "cost",
                f"{way} replies are equal, at {ratio.value:.2f} times the speed ({ends})",
                "a busy machine has the same effect: measure both builds again, in turn",
            )
    return Finding("builds", "nothing", f"{len(both)} replies are equal")
