"""Notebook 08: is speculative output lossless? A real pair is decoded and audited; planted faults show what is seen.

Greedy output must equal plain decoding, token for token. Sampled drafts and tokens must follow the rows that promise
them (`divergence.sampling`). The planted faults change no module: no comparison of tensors can find them. The case of a
note on another engine is made again on the pair.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from specnb.decode import accept
from specnb.decode.accept import Acceptance
from specnb.decode.generate import PromptLike, generate, prompt_ids
from specnb.decode.sampling import Chooser, Draws, ProbRows
from specnb.divergence.faults.planting import replaced
from specnb.divergence.foreign import ForeignAudit, audit_texts, read_texts
from specnb.divergence.sampling import Audit, Position, SamplingTally
from specnb.draft.base import Drafter, Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, NonFiniteLogits
from specnb.io import project_dir
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.lm.toy import ToyLM, markov
from specnb.lm.tree import COMMITTED
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.measure.fork import fork_of
from specnb.measure.triage import triage
from specnb.params import LosslessParams
from specnb.prompts import Prompt, categories, prompts
from specnb.records import Generation, RunRecord

SHIPPED, WRITER, WRITER_F16 = "data/foreign/texts.jsonl", "smollm2-135m:f32", "smollm2-135m:f16"
"""Texts of other engines, and the model that wrote them, in the two types that they computed in."""
TOKENS, K = 32, 4
HELLO, N_TOKENS, N_ROUNDS = "Say hello.", 24, 3


def run_audit(params: LosslessParams, *, progress: Progress = silent) -> RunRecord:
    """Decode greedily and sampled, audit both, and try the audit on planted faults.

    Measurements: `greedy`, a row a prompt; `foreign`, the document of a `ForeignAudit` of what other engines wrote;
    `note`, rows of `show_note`; `audit`, the document of `Audit`; `planted`, the rows of `trial`.
    """
    with Experiment("08_lossless", params, round_robin(params.prompts)) as study:
        target, drafter = study.open_target(params.target), study.open_drafter(params.draft)
        study.drafters.append(drafter)
        rows = study.measured["greedy"] = []
        for prompt in with_progress(study.chosen, progress, "greedy"):
            run = partial(study.decode, prompt.without_template, ignore_eog=True)
            plain, drafted = run(), run(drafter=drafter, k=params.k)
            study.generations.append(drafted)
            fork = fork_of(target, plain, drafted)
            rows.append({
                "prompt": prompt.id, "tokens": len(drafted.token_ids),
                "identical": plain.token_ids == drafted.token_ids, "tau": drafted.tau,
                "fork": fork and fork.position, "near_tie": fork and fork.near_tie,
            })  # fmt: skip
        study.measured["foreign"] = _audit_foreign(study, progress).document()
        if type(drafter) is ModelDrafter:  # the note's case is one of a draft model
            study.measured["note"] = show_note(target, drafter, k=params.k)
        audited = audit_pair(
            target, drafter, study.chosen, k=params.k, temperature=params.temperature, seed=params.seed,
            max_new_tokens=params.max_new_tokens, progress=progress,
        )  # fmt: skip
        study.measured["audit"] = audited.document()
        study.measured["planted"] = trial(seed=params.seed, progress=progress).to_dict("records")
        return study.record()


def _audit_foreign(study: Experiment, progress: Progress) -> ForeignAudit:
    """Audit the texts of a file, or of those shipped the ones behind the chosen prompts."""
    params = study.params
    if params.texts != "shipped":
        texts, other, most = read_texts(Path(params.texts)), params.other, None
    else:
        ids = {prompt.id for prompt in study.chosen if params.target == WRITER}
        texts = [text for text in read_texts(project_dir() / SHIPPED) if text.id in ids]
        other, most = WRITER_F16, params.max_new_tokens
    if not texts:
        return ForeignAudit([], None, "no texts are shipped for this target and these prompts: give a file, texts")
    opened = study.opened(load(other)) if other else None
    return audit_texts(study.target, texts, opened, max_tokens=most, progress=progress)


def round_robin(wanted: int | str) -> list[Prompt]:
    """Take so many shipped prompts, or all of a file or pack, from all categories in turn. Raises InputError."""
    source, n = (wanted, None) if isinstance(wanted, str) else ("", wanted)
    turns = zip_longest(*(prompts(name, source=source) for name in categories(source)))
    chosen = [prompt for turn in turns for prompt in turn if prompt is not None]
    if n is not None and not 1 <= n <= len(chosen):
        raise InputError(f"got {n} prompts, expected 1 to {len(chosen)}: give fewer, and more tokens")
    return chosen[:n]


def audit_pair(
    target: LanguageModel, drafter: Drafter, chosen: Sequence[Prompt], *, seed: int, effect: float = 0.1,
    progress: Progress = silent, **options: Any,
) -> Audit:  # fmt: skip
    """Decode each prompt with a seed of its own, and audit every draft and token against its row."""
    tally = SamplingTally()
    for number, prompt in enumerate(with_progress(chosen, progress, "sampled")):
        generate_logged(
            target, prompt.without_template, drafter=drafter, on_position=tally.add, seed=seed + number,
            ignore_eog=True, **options,
        )  # fmt: skip
    return tally.audit(effect=effect)


def with_progress(chosen: Sequence[Prompt], progress: Progress, stage: str) -> Iterator[Prompt]:
    for number, prompt in enumerate(chosen):
        progress(number, len(chosen), f"{stage}: {prompt.id}")
        yield prompt


# --- positions from our own decoding ----------------------------------------------------------------------------------


def generate_logged(
    target: LanguageModel,
    prompt: PromptLike,
    *,
    drafter: Drafter,
    on_position: Callable[[Position], object],
    **options: Any,
) -> Generation:
    """Run `decode.generate` by the rule "token", bit for bit; `on_position` gets each position that was committed.

    Of a long log keep sums, not rows: `sampling.SamplingTally().add` does.
    """
    text = list(prompt_ids(target, prompt))

    def token(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
        uniform, uniforms = chooser.draws.uniform, []

        def note_uniform() -> float:
            uniforms.append(uniform())
            return uniforms[-1]

        with replaced(chooser.draws, "uniform", note_uniform):
            acceptance = accept.RULES["token"](logits, proposal, chooser)
        kept = acceptance.n_accepted
        # of a tree no draft is tested: each place is drawn from p, and may be one of the drafts
        drafts = () if proposal.tree is not None else proposal.ids[: kept + 1]
        # a number for each test or draw, and one for the token behind; greedy rounds draw none
        drawn = uniforms or [None] * (kept + 2)
        committed_ids = [*(proposal.ids[node] for node in acceptance.path), acceptance.next_id]
        for at, (node, committed) in enumerate(zip([COMMITTED, *acceptance.path], committed_ids, strict=True)):
            drafted = at < len(drafts)
            resampled = drawn[-1] if at == kept else None if drafted else drawn[at]
            on_position(Position(
                chooser.sampling.probabilities(logits[node + 1]),
                proposal.q_draft[at] if drafted and proposal.q_draft is not None else None,
                draft_id=drafts[at] if drafted else None, accepted=drafted and at < kept, committed_id=committed,
                accept_u=drawn[at] if drafted else None, resample_u=resampled, prefix=tuple(text),
            ))  # fmt: skip
            text.append(committed)
        return acceptance

    return generate(target, tuple(text), drafter=drafter, rule=token, **options)


# --- planted faults of sampling ---------------------------------------------------------------------------------------


@contextmanager
def misreported_q(drafter: Drafter, *, top_k: int) -> Iterator[None]:
    """The drafter draws from its `top_k` likeliest tokens, and reports the raw row. (transformers#47932, vllm#40149)"""
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
    """After a rejection the token is drawn from p instead of norm(max(p - q, 0)), by the rule "token", in this process:
    the acceptances stay what they were, and the output leans to what the drafter likes."""

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
    """For each of PLANTED: verdict, causes, positions that were tested, and the z values of the panel.

    The toys know `TOKENS` tokens and sample at temperature 1. Raises what `generate` raises.
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
                    target, [offset % TOKENS], drafter=drafter, on_position=tally.add, temperature=1.0, k=K,
                    max_new_tokens=max_new_tokens, seed=seed + offset,
                )  # fmt: skip
        audit = tally.audit()
        z = {statistic.name: statistic.z for statistic in audit.panel}
        rows.append({"planted": name, "verdict": audit.verdict, "causes": ", ".join(audit.causes), "n": audit.n, **z})
    return pd.DataFrame(rows)


def related(seed: int) -> tuple[LanguageModel, LanguageModel]:
    """A target, and a draft whose logits are the mean of the target's and another model's."""
    parts = markov(TOKENS, seed=seed), markov(TOKENS, seed=seed + 10_000)

    def guess(prefix: tuple[int, ...]) -> np.ndarray:
        for part in parts:
            part.reset()
        return np.mean([part.forward(prefix)[-1] for part in parts], axis=0)

    return markov(TOKENS, seed=seed), ToyLM(guess, parts[0].vocab, name="draft")


# --- the note's case, made again on a pair ----------------------------------------------------------------------------
# Text that says everything twice, because the drafter writes into the text that it reads; the note's cure, by which all
# drafts of a round are one guess; NaN among the logits; a draft model that cannot be opened.


class SameInputDrafter(ModelDrafter):
    """The note's cure: every draft of a round is made from the same input."""

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
        pass  # nothing is kept from round to round


def show_note(target: LanguageModel, drafter: Any, *, k: int) -> list[dict[str, Any]]:
    """Return a row for each case: `done`, `text`, `seen`. The models' states are empty afterwards."""
    prompt = [{"role": "user", "content": HELLO}] if target.vocab.chat_template else HELLO
    run, forward = partial(generate, target, prompt, k=k, max_new_tokens=N_TOKENS), target.forward
    sound, cured = run(drafter=drafter), run(drafter=SameInputDrafter(drafter.model))
    judged = triage([cured], vocab_size=target.vocab.size)
    # a loop whose drafter appends to the text writes the drafts of a round, and again what it commits
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
        ("drafts are a proposal, and the text stays as it is", sound.text, _kept(sound)),
        (
            "drafts are appended to the text, and what is kept once more",
            appended,
            "cannot happen here: a drafter gets a read-only view",
        ),
        ("every draft from the same input", cured.text, f"{_kept(cured)}; {judged.line or judged.verdict}"),
        ("NaN among the logits", "", refused),
        ("the draft model's file is damaged", alone.text, fallback),
    ]
    target.reset()
    drafter.model.reset()
    return [dict(zip(("done", "text", "seen"), row, strict=True)) for row in rows]


def _kept(generation: Generation) -> str:
    return f"{generation.accepted_tokens} of {generation.total_draft_tokens} drafts kept"
