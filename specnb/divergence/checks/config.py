"""What the configs of a draft and a target disagree on: RoPE, quantisation, defaults of sampling.

They differ for good reasons, too: models trained apart have each their own RoPE. What matters is where the draft ends
before the target does, or is taken for what it is not.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from specnb.errors import InputError
from specnb.io import read_json

Verdict = Literal["ok", "warn", "fail", "skipped"]
RANK: dict[str, int] = {"fail": 0, "warn": 1, "ok": 2, "skipped": 3}


class Finding(NamedTuple):
    """One check and its outcome. `evidence` says what was seen, also where nothing is wrong; `skipped` why not.

    `warn` is what may be meant (a longer context of the target), `fail` what cannot be (weights never written).
    `issues` are known cases upstream.
    """

    check: str
    verdict: Verdict
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()


def table(findings: Iterable[Finding]) -> pd.DataFrame:
    """The findings, worst first: check, verdict, evidence, remedy, issues."""
    ranked = sorted(findings, key=lambda config: RANK[config.verdict])
    return pd.DataFrame(ranked, columns=list(Finding._fields))


Config = dict[str, Any]
MAX_BYTES = 8 << 20
SAMPLING = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
"""What generation_config.json sets, and transformers' defaults, which stand in where one file says nothing."""
FROM_TARGET = ("eagle", "mtp", "dflash", "medusa", "nextn")
"""In the name of an architecture: it runs on the target's hidden states, so that it must have the target's RoPE."""
SCALE_NAMES = (
    ".weight_scale", ".weight_scale_inv", ".weight_packed", ".qzeros", ".scales", "_scales", "_blocks", ".absmax",
)  # fmt: skip
"""Ends of the names of tensors that only quantised weights have."""


def read_config(folder: Path | str, name: str = "config.json") -> Config | None:
    """The object in a config of a model folder; None without the file. Raises InputError for one that is not sound."""
    path = Path(folder) / name
    return read_json(path, MAX_BYTES) if path.exists() else None


def text_part(config: Config) -> Config:
    """The language model's part of a config that has others as well."""
    return config.get("text_config") or config


def count(config: Config, key: str) -> int | None:
    """The whole number under a key, None where there is none. Raises InputError for anything else."""
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise InputError(f"{key} is {value!r:.80} in a config: it must be a whole number; fetch the file again")
    return value


def rope(draft: Config | None, target: Config | None) -> Finding:
    """Whether positions mean the same as far as the target goes."""
    check, issues = "rope", ("vLLM #58080", "vLLM #57941", "SGLang #38786")
    if draft is None or target is None:
        return Finding(check, "skipped", "it needs config.json of draft and target")
    of_draft, of_target = text_part(draft), text_part(target)
    ends = [count(config, "max_position_embeddings") for config in (of_draft, of_target)]
    a, b = _rope(of_draft), _rope(of_target)
    apart = {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}
    shown = "; ".join(f"{key}: {mine!r:.40} against {its!r:.40}" for key, (mine, its) in apart.items())
    if apart and _runs_on_target(draft):
        return Finding(check, "fail", f"the draft runs on the target's states, with another RoPE: {shown}",
                       "copy rope_parameters (or rope_theta and rope_scaling) of the target into the draft's config",
                       issues)  # fmt: skip
    if None not in ends and ends[0] < ends[1]:
        seen = f"the draft knows {ends[0]} positions, the target {ends[1]}" + (f"; {shown}" if shown else "")
        remedy = f"keep prompt and answer within {ends[0]} tokens, or expect no acceptance beyond"
        return Finding(check, "warn", seen, remedy, issues)
    if shown:
        return Finding(check, "ok", f"they differ, as models trained apart do: {shown}")
    return Finding(check, "ok", f"the same: {', '.join(f'{key} {value}' for key, value in a.items()) or 'none given'}")


def _rope(text: Config) -> Config:
    """RoPE as stated, old keys and new (transformers 5: rope_parameters, possibly by layer type), None left out."""
    stated = {key: text.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for key, value in ((text.get("rope_scaling") or {}) | (text.get("rope_parameters") or {})).items():
        stated |= (
            {f"{key}.{inner}": config for inner, config in value.items()} if isinstance(value, dict) else {key: value}
        )
    stated = {("rope_type" if key == "type" else key): value for key, value in stated.items()}
    return {k: v for k, v in stated.items() if v is not None and (k, v) != ("rope_type", "default")}


def _runs_on_target(config: Config) -> bool:
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    return any(mark in str(name).lower() for name in names for mark in FROM_TARGET)


def quantisation(
    draft: Config | None, target: Config | None, stored: Mapping[str, str], opened: Mapping[str, Any] | None = None
) -> Finding:
    """Whether the draft is quantised as its own files say, and not as the target is.

    `stored` are dtypes by name from the headers of the draft's weights; `opened` is the quantisation_config of the
    model that was made of them ({}: none), None where there is no opened model.
    """
    check, issues = "quantisation", ("SGLang #39087", "SGLang #22823", "SGLang #34622", "SGLang #28196")
    if draft is None:
        return Finding(check, "skipped", "it needs the draft's config.json")
    of_draft, its = (_method((config or {}).get("quantization_config") or {}) for config in (draft, target))
    if opened is not None and _method(opened) != of_draft:
        now = _method(opened) or "none"
        inherited = " (the target's)" if _method(opened) == its and its else ""
        return Finding(check, "fail", f"its config says {of_draft or 'none'}, the opened model has {now}{inherited}",
                       "open the draft with its own quantisation_config", issues)  # fmt: skip
    scales = [name for name in stored if name.endswith(SCALE_NAMES)]
    if stored and bool(scales) != bool(of_draft) and (scales or of_draft != "bitsandbytes"):
        seen = f"{len(scales)} tensors of scales (the first: {scales[0]:.80})" if scales else "no scales"
        return Finding(check, "fail", f"its config says {of_draft or 'none'}, its files hold {seen}",
                       "fetch config.json and weights of the same revision", issues)  # fmt: skip
    if of_draft != its and target is not None:
        return Finding(check, "warn", f"draft: {of_draft or 'none'}, target: {its or 'none'}",
                       "make sure that the engine takes each from its own config", issues)  # fmt: skip
    return Finding(check, "ok", f"draft: {of_draft or 'none'}" + (f", target: {its or 'none'}" if target else ""))


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("quant_method") or ("unnamed" if config else ""))[:40]


def sampling_defaults(draft: Config | None, target: Config | None) -> Finding:
    """Whether both would sample alike if nobody says how: a draft's own top-k makes its reported q another one.

    A model without the file (None) samples as transformers does by default.
    """
    check = "sampling defaults"
    if draft is None and target is None:
        return Finding(check, "skipped", "neither folder has a generation_config.json")
    a, b = (
        SAMPLING | {key: value for key, value in (config or {}).items() if value is not None}
        for config in (draft, target)
    )
    apart = [f"{key}: {a[key]!r:.20} against {b[key]!r:.20}" for key in SAMPLING if a[key] != b[key]]
    if not apart:
        return Finding(check, "ok", "the same in both generation configs")
    return Finding(check, "warn", "; ".join(apart), "state temperature, top_k and top_p in every call, for both models",
                   ("transformers #47932", "transformers #32867", "vLLM #33497"))  # fmt: skip
