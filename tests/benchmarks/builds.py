"""What `specnb attach --compare` reports between llama.cpp server builds, and for planted changes.

    pip install xllamacpp==2026.9.11063
    python -m tests.benchmarks.builds measure older.json
    pip install xllamacpp==2026.10.11549
    python -m tests.benchmarks.builds measure newer.json --repeats 9 --changes
    python -m tests.benchmarks.builds measure idle.json --repeats 9
    python -m tests.benchmarks.builds compare older.json newer.json idle.json

`measure` takes fingerprints of one build: repeated, unchanged (A/A pairs, of which none may
differ), and with each of eight changes. `compare` prints the verdict on each pair and stores the
counts of A/A pairs, for each file but the first.
"""

import argparse
import itertools
import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specnb.batch import attach as servers
from specnb.io import plain, read_json, write_atomic
from specnb.measure.experiment import first_of_each
from specnb.params import ServerParams
from specnb.prompts import prompts
from tests.benchmarks.your_server import CONTENTS, K, serve

THREADS = 2
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "target in 8 bits": ("arithmetic", {"target": "smollm2-135m:q8_0"}),
    "keys of the KV cache in 8 bits": ("arithmetic", {"key_type": "Q8_0"}),
    "draft model in 8 bits": ("drafting", {"draft": "smollm2-135m:q8_0"}),
    "K = 4": ("drafting", {"k": 4}),
    "no drafts": ("drafting", {"k": 0}),
    "p_min = 0.9": ("drafting", {"p_min": 0.9}),
    "one thread": ("cost", {"threads": 1}),
    "one thread for verification": ("cost", {"verify_threads": 1}),
}
"""Planted changes, their class, and the settings of `serve`."""


def fingerprint(each: int, tokens: int, **changed: Any) -> dict[str, Any]:
    """Run `each` prompts per content on two servers, one of them plain; return the measurements."""
    settings = {"k": K, "threads": THREADS} | changed
    chosen = [prompt for prompt in first_of_each(prompts(), each) if prompt.category in CONTENTS]
    with serve(**settings) as url, serve(**settings | {"k": 0}) as plain_url:
        return servers.attach(
            ServerParams(server=url, plain=plain_url, max_new_tokens=tokens), chosen
        )


def measure(out: Path, repeats: int, changes: bool, each: int, tokens: int) -> None:
    same = [fingerprint(each, tokens) for _ in range(repeats)]
    changed = {
        name: fingerprint(each, tokens, **planted)
        for name, (_, planted) in CHANGES.items()
        if changes
    }
    document = {"build": version("xllamacpp"), "same": same, "changed": changed}
    write_atomic(out, json.dumps(plain(document, nan=None)).encode())


def compare(older: Path, newer: Path, *unchanged: Path) -> None:
    old = read_json(older)
    new = read_json(newer)
    equal = [
        Counter(
            servers.compare_builds(a, b).verdict for a, b in itertools.combinations(same["same"], 2)
        )
        for same in (new, *map(read_json, unchanged))
    ]
    planted = {
        name: {"planted": CHANGES[name][0], **servers.compare_builds(new["same"][0], run)._asdict()}
        for name, run in new["changed"].items()
    }
    releases = servers.compare_builds(old["same"][0], new["same"][0])._asdict()
    document = {
        "builds": [old["build"], new["build"]],
        "equal": equal,
        "changes": planted,
        "releases": releases,
    }
    text = json.dumps(document, indent=1)
    print(text)
    write_atomic(Path(__file__).with_suffix(".json"), text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["measure", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=1, help="fingerprints without a change")
    parser.add_argument("--changes", action="store_true", help="fingerprints with each change, too")
    parser.add_argument("--prompts-per-content", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    if given.action == "compare":
        compare(*given.files)
    else:
        measure(
            given.files[0], given.repeats, given.changes, given.prompts_per_content, given.tokens
        )


if __name__ == "__main__":
    main()
