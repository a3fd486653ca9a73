"""Shared by the benchmarks: arguments, and the records that they write."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch

from specnb.io import plain, read_json, write_json
from specnb.machine import cpu_facts
from specnb.prompts import digest_prompts
from specnb.provenance import provenance

KEY = ("target", "model", "engine", "content", "method", "cpu", "capability")
"""A row of a record is replaced by a new one with the same values in these fields."""


def arguments(description, script, **defaults):
    """Return a parser with an option for each default, which gives its type; lists take words.

    `--out` is the JSON record to write, by default next to the script.
    """
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    for name, default in ({"out": Path(script).with_suffix(".json")} | defaults).items():
        several = isinstance(default, list)
        parser.add_argument(
            f"--{name}",
            type=type(default[0] if several else default),
            nargs="+" if several else None,
            default=default,
            help="[%(default)s]",
        )
    return parser


def write_record(path, document, chosen=()):
    """Write a document with its provenance, which has the digest of the prompts."""
    _write(path, {**document, "provenance": _facts(chosen)})


def add_rows(path, lists, chosen=()):
    """Add rows to the lists of a record; each row names its CPU, and the provenance is by CPU."""
    cpu = {"cpu": cpu_facts()["model"], "capability": torch.backends.cpu.get_cpu_capability()}
    document = read_json(path) if path.is_file() else {"provenance": {}}
    for name, rows in lists.items():
        every = [*document.get(name, ()), *(row | cpu for row in rows)]
        document[name] = list(
            {tuple(row.get(field) for field in KEY): row for row in every}.values()
        )
    document["provenance"][" ".join(cpu.values())] = _facts(chosen)
    _write(path, document)


def _facts(chosen):
    return provenance(prompts_digest=digest_prompts(chosen) if chosen else None)


def _write(path, document):
    write_json(path, plain(document, nan=None))
