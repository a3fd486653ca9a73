"""Notebook 08: is speculative output lossless? Decode and audit a real pair, and planted faults.

Greedy output must equal plain decoding, token for token. Sampled draft tokens and output tokens
must follow their rows (`divergence.sampling`). The planted faults change no module: no comparison
of tensors can find them. The case of a note on another engine is reproduced on the pair.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import dots, dress
from specnb.decode import accept
from specnb.decode.accept import Acceptance
from specnb.decode.generate import generate, prompt_ids
from specnb.decode.sampling import Draws, ProbRows
from specnb.divergence.faults.planting import replaced
from specnb.divergence.foreign import ForeignAudit, audit_texts, read_texts
from specnb.divergence.lossless import audit_pair, generate_logged, round_robin
from specnb.divergence.sampling import SamplingTally
from specnb.draft.base import Drafter, Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import NonFiniteLogits
from specnb.io import project_dir
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.lm.toy import ToyLM, markov
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.measure.fork import fork_of
from specnb.measure.triage import triage
from specnb.params import LosslessParams
from specnb.records import Generation, RunRecord

SHIPPED, WRITER, WRITER_F16 = "data/foreign/texts.jsonl", "smollm2-135m:f32", "smollm2-135m:f16"
"""Texts of other engines, and the model that wrote them, in the two types that were used."""
TOKENS, K = 32, 4
HELLO, N_TOKENS, N_ROUNDS = "Say hello.", 24, 3
SUMS = {"z_acc": "draft tokens accepted", "z_surp": "surprise of committed tokens"}
"""Columns of the two sums, and what each measures."""


def run_audit(params: LosslessParams, *, progress: Progress = silent) -> RunRecord:
    """Decode greedily and sampled, audit both, and try the audit on planted faults.

    Measurements: `greedy`, one row per prompt; `foreign`, the document of a `ForeignAudit` of other
    engines' texts; `note`, the rows of `show_note`; `audit`, the document of `Audit`; `planted`,
    the rows of `trial`.
    """
    with Experiment("08_lossless", params, round_robin(params.prompts)) as study:
        target, drafter = study.open_target(params.target), study.open_drafter(params.draft)
        study.drafters.append(drafter)
        rows = study.measured["greedy"] = []
        for number, prompt in enumerate(study.chosen):
            progress(number, len(study.chosen), f"greedy: {prompt.id}")
            run = partial(study.decode, prompt.without_template, ignore_eog=True)
            plain, drafted = run(), run(drafter=drafter, k=params.k)
            study.generations.append(drafted)
            fork = fork_of(target, plain, drafted)
            rows.append(
                {
                    "prompt": prompt.id,
                    "tokens": len(drafted.token_ids),
                    "identical": plain.token_ids == drafted.token_ids,
                    "tau": drafted.tau,
                    "fork": fork and fork.position,
                    "near_tie": fork and fork.near_tie,
                }
            )
        study.measured["foreign"] = _audit_foreign(study, progress).document()
        if type(drafter) is ModelDrafter:  # the note is about a draft model
            study.measured["note"] = show_note(target, drafter, k=params.k)
        audited = audit_pair(
            target,
            drafter,
            study.chosen,
            k=params.k,
            temperature=params.temperature,
            seed=params.seed,
            max_new_tokens=params.max_new_tokens,
            progress=progress,
        )
        study.measured["audit"] = audited.document()
        study.measured["planted"] = trial(seed=params.seed, progress=progress).to_dict("records")
        return study.record()


def _audit_foreign(study: Experiment, progress: Progress) -> ForeignAudit:
    """Audit the texts of a file, or the shipped ones of the chosen prompts."""
    params = study.params
    if params.texts != "shipped":
        texts, other, most = read_texts(Path(params.texts)), params.other, None
    else:
        ids = {prompt.id for prompt in study.chosen if params.target == WRITER}
        texts = [text for text in read_texts(project_dir() / SHIPPED) if text.id in ids]
        other, most = WRITER_F16, params.max_new_tokens
    if not texts:
        return ForeignAudit([], None, "no shipped texts for this target and these prompts: set `texts` to a file")
    opened = study.opened(load(other)) if other else None
    return audit_texts(study.target, texts, opened, max_tokens=most, progress=progress)


# --- tables and the figure, from the record ------------------------------------------------------


def greedy(record: RunRecord) -> pd.DataFrame:
    """One row per prompt: identical to plain decoding, or where it diverges."""
    return pd.DataFrame(record.measurements["greedy"])


def panel(record: RunRecord) -> pd.DataFrame:
    """The two sums of the audited pair; `z` as `divergence.sampling` defines it."""
    return pd.DataFrame(record.measurements["audit"]["panel"])[["name", "z", "p_value", "far"]]


def foreign(record: RunRecord) -> pd.DataFrame:
    """One row per source of texts: forks, new forks with drafts, largest margin, verdict."""
    columns = ["source", "texts", "tokens", "forks", "new", "margin", "first", "verdict"]
    return pd.DataFrame(record.measurements["foreign"]["sources"], columns=columns).astype({"new": "Int64"})


def note(record: RunRecord) -> pd.DataFrame:
    """The note's case, reproduced on the pair: what was done, the text, what it shows."""
    return pd.DataFrame(record.measurements.get("note", []), columns=["done", "text", "seen"])


def planted(record: RunRecord) -> pd.DataFrame:
    """The audit on a toy pair: one row per planted fault, with verdict, causes and the two sums."""
    return pd.DataFrame(record.measurements["planted"])


def planted_figure(record: RunRecord) -> go.Figure:
    """The two sums of each planted fault; between the lines is chance."""
    sums = {name: f"{name}: {says}" for name, says in SUMS.items()}
    rows = planted(record).rename(columns=sums).melt("planted", [*sums.values()], var_name="sum", value_name="z")
    return dress(dots(rows, x="z", y="planted", by="sum"), "planted")


# --- planted faults of sampling -------------------------------------------------------------------


@contextmanager
def misreported_q(drafter: Drafter, *, top_k: int) -> Iterator[None]:
    """Let the drafter draw from its `top_k` likeliest tokens and report the raw row.

    (transformers#47932, vllm#40149)
    """
    propose = drafter.propose

    def misreporting(tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        drawn = replace(picker.sampling, top_k=top_k)

        def pick(logits: np.ndarray) -> tuple[int, np.ndarray]:
            return picker.draws.categorical(drawn.probabilities(logits)), picker.sampling.probabilities(logits)

        with replaced(picker, "pick", pick):
            return propose(tokens, k, picker)

    with replaced(drafter, "propose", misreporting):
        yield


@contextmanager
def resampled_from_target() -> Iterator[None]:
    """After a rejection, draw the token from p instead of norm(max(p - q, 0)), in the rule "token".

    The acceptances stay the same, and the output favors the drafter's tokens. It affects this
    process.
    """

    def from_target(p_target: ProbRows, q_draft: np.ndarray, draft_ids: Sequence[int], draws: Draws) -> Acceptance:
        chances = (p_target[i][x] / q_draft[i][x] for i, x in enumerate(draft_ids))
        n = next((i for i, chance in enumerate(chances) if not draws.bernoulli(chance)), len(draft_ids))
        return Acceptance.leading(n, draws.categorical(p_target[n]))

    with replaced(accept, "token_verification", from_target):
        yield


PLANTED = {
    "nothing": nullcontext,
    "top-k drafts, raw row reported": partial(misreported_q, top_k=8),
    "greedy drafts, raw row reported": partial(misreported_q, top_k=1),
    "resampled from p": lambda drafter: resampled_from_target(),
}


def trial(*, prompts: int = 8, max_new_tokens: int = 200, seed: int = 0, progress: Progress = silent) -> pd.DataFrame:
    """Audit a toy pair under each of PLANTED: verdict, causes, number of positions, and both z.

    The toys have `TOKENS` tokens and sample at temperature 1. Raises what `generate` raises.
    """
    rows = []
    for number, (name, plant) in enumerate(PLANTED.items()):
        progress(number, len(PLANTED), name)
        tally = SamplingTally()
        for offset in range(prompts):
            target, draft = related(seed + offset)
            drafter = ModelDrafter(draft)
            with plant(drafter):
                generate_logged(
                    target,
                    [offset % TOKENS],
                    drafter=drafter,
                    on_position=tally.add,
                    temperature=1.0,
                    k=K,
                    max_new_tokens=max_new_tokens,
                    seed=seed + offset,
                )
        audit = tally.audit()
        z = {statistic.name: statistic.z for statistic in audit.panel}
        rows.append({"planted": name, "verdict": audit.verdict, "causes": ", ".join(audit.causes), "n": audit.n, **z})
    return pd.DataFrame(rows)


def related(seed: int) -> tuple[LanguageModel, LanguageModel]:
    """Return a target, and a draft with the mean logits of the target and another model."""
    parts = markov(TOKENS, seed=seed), markov(TOKENS, seed=seed + 10_000)

    def guess(prefix: tuple[int, ...]) -> np.ndarray:
        for part in parts:
            part.reset()
        return np.mean([part.forward(prefix)[-1] for part in parts], axis=0)

    return markov(TOKENS, seed=seed), ToyLM(guess, parts[0].vocab, name="draft")


# --- the note's case, reproduced on a pair --------------------------------------------------------
# Text that repeats everything, because the drafter writes into the text that it reads; the note's
# fix, which makes all draft tokens of a round the same guess; NaN in the logits; a damaged draft
# model.


class SameInputDrafter(ModelDrafter):
    """The note's fix: every draft token of a round is computed from the same input."""

    model: Any

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        ids = []
        for _ in range(k):
            self.model.reset()
            if picked := picker.pick(self.model.forward(tokens[:], n_logits=1)[0]):
                ids.append(picked[0])
        self.model.reset()
        return Proposal(tuple(ids))

    def commit(self, tokens: Sequence[int]) -> None:
        pass  # no state from round to round


def show_note(target: LanguageModel, drafter: Any, *, k: int) -> list[dict[str, Any]]:
    """Return one row per case: `done`, `text`, `seen`. The models' states are empty afterwards."""
    prompt = [{"role": "user", "content": HELLO}] if target.vocab.chat_template else HELLO
    run, forward = partial(generate, target, prompt, k=k, max_new_tokens=N_TOKENS), target.forward
    sound, cured = run(drafter=drafter), run(drafter=SameInputDrafter(drafter.model))
    judged = triage([cured], vocab_size=target.vocab.size)
    # A loop whose drafter appends to the text writes the draft tokens, and then the committed ones.
    tokens = [*prompt_ids(target, prompt)]
    begun = len(tokens)
    for _ in range(N_ROUNDS):
        first = generate(target, tokens, drafter=drafter, k=k, max_new_tokens=k + 1).rounds[0]
        tokens += [*first.draft_ids, *first.committed_ids]
    appended = target.vocab.decode(tokens[begun:])
    try:
        with replaced(target, "forward", lambda *ids, **options: np.nan * forward(*ids, **options)):
            refused = f"not refused: {run(drafter=drafter).text}"
    except NonFiniteLogits as error:
        refused = f"stopped: {error}"
    with TemporaryDirectory() as folder:
        damaged = Path(folder) / "draft.gguf"
        damaged.write_bytes(b"GGUF")
        alone = generate(target, prompt, drafter=str(damaged), max_new_tokens=N_TOKENS)
        fallback = str(alone.fallback).replace(f"{folder}/", "").partition("; ")[0]
    rows = [
        ("draft tokens are a proposal; the text does not change", sound.text, _kept(sound)),
        (
            "draft tokens are appended to the text, and accepted ones again",
            appended,
            "cannot happen here: a drafter gets a read-only view",
        ),
        ("every draft token from the same input", cured.text, f"{_kept(cured)}; {judged.line or judged.verdict}"),
        ("NaN in the logits", "", refused),
        ("the draft model's file is damaged", alone.text, fallback),
    ]
    target.reset()
    drafter.model.reset()
    return [dict(zip(("done", "text", "seen"), row, strict=True)) for row in rows]


def _kept(generation: Generation) -> str:
    return f"{generation.accepted_tokens} of {generation.total_draft_tokens} drafts kept"
