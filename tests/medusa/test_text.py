"""Training text: the backbone's greedy choices, resumed to the bit, in turns; and the examples cut from it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.vocab import Vocabulary
from specnb.medusa import corpus, data, text
from specnb.medusa.corpus import Document
from specnb.medusa.nets import OUTSIDE
from specnb.medusa.text import Turns, Writing
from tests.tiny_models import torch_model

END, ROLE = 2, {"user": 3, "assistant": 4}
TEMPLATE = (
    "{% for m in messages %}{{ '\x10' if m.role == 'user' else '\x11' }}{{ m.content }}\x12{% endfor %}"
    "{% if add_generation_prompt %}\x11{% endif %}"
)
CONTROL = {"\x10": ROLE["user"], "\x11": ROLE["assistant"], "\x12": END}
WRITING = Writing(length=40, batch_size=3, longest_seed=16, longest_answer=8, longest_request=5)


class Writer:
    """A tokenizer of one token a character, over a tiny network's vocabulary."""

    name = "writer"

    def __init__(self, size: int, template: str | None = TEMPLATE) -> None:
        pieces = [b"", b"", b"<end>", b"<user>", b"<assistant>", *(bytes([97 + i % 26]) for i in range(size - 5))]
        self.vocab = Vocabulary(
            tuple(pieces), eog=frozenset({END}), special=frozenset({END, 3, 4}), chat_template=template
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [CONTROL.get(c, 5 + ord(c) % (self.vocab.size - 5)) for c in text]


@pytest.fixture(scope="module")
def net():
    return torch_model("llama", vocab_size=64, max_position_embeddings=128).eval()


@pytest.fixture
def writer():
    return Writer(64)


@pytest.fixture(autouse=True)
def documents(monkeypatch, request):
    texts = [
        Document(f"p/{i}.py", kind, f"first line {i}\nsecond\n\nthird {kind}\n")
        for i in range(6)
        for kind in ("code", "prose")
    ]
    if "corpus" not in request.node.name:
        monkeypatch.setattr(corpus, "installed", lambda _packages: [])
        monkeypatch.setattr(corpus, "documents", lambda _sources: texts)
        monkeypatch.setattr(corpus, "split", lambda documents: (documents, documents))


def test_the_corpus_is_the_same_each_time_and_names_no_place_of_this_machine(monkeypatch):
    monkeypatch.setattr(corpus, "DOCSTRINGS_ONLY", {"typer"})
    texts = corpus.documents(corpus.installed(["rich", "typer"]))
    training, held_out = corpus.split(texts)
    assert {document.kind for document in texts} == {"code", "prose"}
    assert len(training) + len(held_out) == len(texts) > 8 * len(held_out) > 0
    assert not any(str(Path.home()) in document.text for document in texts) or str(Path.home()) == "/"
    again = corpus.documents(corpus.installed(["typer", "rich"]))
    assert corpus.corpus_digest(again) == corpus.corpus_digest(texts) != corpus.corpus_digest(training)


def written(net, writer, folder, **changed):
    writer.network = net
    data.write(writer, folder, **({"batches": {"train": 2}, "writing": WRITING} | changed))
    return data.read(folder, "train")


@torch.inference_mode()
def logits_of(net, tokens):
    return net(torch.from_numpy(tokens.astype(np.int64))).logits


@pytest.mark.parametrize("kind", ["llama", "mamba", "gpt2"])
def test_own_tokens_are_the_greedy_choice(writer, tmp_path, kind):
    """Also of families that keep their state otherwise."""
    net = torch_model(kind, vocab_size=64, max_position_embeddings=128).eval()
    rows = written(net, writer, tmp_path)
    assert rows.tokens.shape == (6, WRITING.length) and 0 < rows.n_own < rows.tokens.size
    logits = logits_of(net, rows.tokens)[:, :-1]
    chosen = logits.gather(-1, torch.from_numpy(rows.tokens[:, 1:, None].astype(np.int64)))[..., 0]
    assert (chosen - logits.amax(-1))[torch.from_numpy(rows.own[:, 1:])].min() > -1e-3


def test_turns_are_written_as_the_template_writes_them(net, writer, tmp_path):
    turns = Turns.of(writer)
    assert (turns.opening, turns.to_answer, turns.to_request) == ((3,), (END, 4), (END, 3))
    rows = written(net, writer, tmp_path)
    roles = 0
    for tokens, own in zip(rows.tokens, rows.own, strict=True):
        for at in range(WRITING.longest_seed, WRITING.length - 1):  # END hands over, so what follows it is a role
            if tokens[at - 1] == END and not own[at]:
                roles += 1
                assert tokens[at] in ROLE.values() and not (own[at + 1] and tokens[at] == ROLE["user"])
    assert roles, "rows hold turns beside the first"


def test_a_stopped_run_goes_on_to_the_same_text(net, writer, tmp_path):
    whole = written(net, writer, tmp_path / "whole", batches={"train": 3})
    stop = [100]

    def interrupt(n):
        stop[0] -= n
        if stop[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(net, writer, tmp_path / "parts", batches={"train": 3}, on_tokens=interrupt)
    again = written(net, writer, tmp_path / "parts", batches={"train": 3})
    assert whole.digest() == again.digest()
    with pytest.raises(InputError, match="other settings"):
        written(torch_model("llama", vocab_size=64, seed=9), writer, tmp_path / "whole")


def test_states_are_those_in_front_of_the_final_norm_as_near_as_bfloat16_rounds(net, writer, tmp_path):
    rows = written(net, writer, tmp_path, batches={"train": 1})
    states, logits = data.read_states(tmp_path, "train").float(), logits_of(net, rows.tokens)
    with torch.inference_mode():
        from_states = net.lm_head(net.model.norm(states))
    assert (from_states - logits).abs().max() < 0.02 * logits.abs().max()


def test_given_text(net, writer, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "abcdefgh" * 20}) + "\n" for _ in range(10)))
    writer.network = net
    for _ in range(2):
        data.write_given(writer, file, tmp_path / "out", length=40)
    train, held_out = (data.read(tmp_path / "out", split) for split in data.SPLITS)
    assert train.own.all() and train.tokens.size + held_out.tokens.size == 10 * 161 // 40 * 40
    for wrong in ('{"text": 1}', "[]", '{"text": "a", "more": 1}', "{", '{"text": "too little"}'):
        file.write_text(wrong + "\n")
        with pytest.raises(InputError):
            data.write_given(writer, file, tmp_path / "other" / str(len(wrong)), length=40)


# --- examples -------------------------------------------------------------------------------------------------------

N_HEADS = 3


def examples(own, token_map=None, length=12):
    """Two rows of tokens 0, 1, 2, …, with hidden states that say which position they are of."""
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    states = torch.arange(2 * length, dtype=torch.bfloat16).reshape(2, length, 1)
    rows = data.TextRows(tokens, np.broadcast_to(own, tokens.shape).copy())
    return data.Examples(rows, states, n_heads=N_HEADS, token_map=token_map, vocab_size=24)


def test_head_i_is_shown_the_tokens_since_and_says_the_one_behind_them():
    every = examples(True)
    batch = every.spread(len(every))
    at = batch.hidden[:, 0].long()
    for i in range(N_HEADS):
        assert (batch.ids[:, i] == at + 1 + i).all() and (batch.labels[:, i] == at + 2 + i).all()
        assert (batch.later[:, i, 0].long() == at + 1 + i).all()
    assert len(every) == 2 * (12 - 1 - N_HEADS)
    few = examples(True, token_map=torch.tensor([2, 4, 6, 8]))
    assert set(few.spread(99).labels.unique().tolist()) == {OUTSIDE, 0, 1, 2, 3}


def test_nothing_is_learned_of_what_others_wrote():
    own = np.ones(12, dtype=bool)
    own[[0, 1, 2, 7]] = False
    for labels in examples(own).spread(99).labels:
        told = labels[labels >= 0] % 12
        assert labels[0] != data.NO_LABEL and not np.isin(told, np.flatnonzero(~own)).any()
        assert (np.diff(told) == 1).all(), "no label behind a gap: its context was somebody else's"


def test_every_epoch_visits_each_example_once():
    every = examples(True)
    steps = len(every) // 4
    seen = [every.at_step(s, batch_size=4, seed=1).hidden.flatten() for s in range(2 * steps)]
    first, second = torch.cat(seen[:steps]), torch.cat(seen[steps:])
    assert sorted(first.tolist()) == sorted(set(first.tolist())) and first.tolist() != second.tolist()
    with pytest.raises(InputError, match="write more text"):
        every.at_step(0, batch_size=1000, seed=0)


def test_the_draft_vocabulary_is_what_the_backbone_wrote_most_often():
    tokens = np.array([[5, 5, 5, 9, 9, 1, 7]], dtype=np.int32)
    rows = data.TextRows(tokens, np.array([[True] * 6 + [False]]))
    assert data.most_frequent(rows, 2).tolist() == [5, 9]
    assert data.most_frequent(rows, 4).tolist() == [1, 5, 7, 9], "7 was not its own, but is in the text"
    assert data.coverage(rows, torch.tensor([5, 9])) == 5 / 6
    with pytest.raises(InputError, match="4 different"):
        data.most_frequent(rows, 5)


def test_a_bos_token_stands_in_front_of_the_chat_only():
    class Adding(Writer):
        def encode(self, text, *, special=True):
            return [1, *super().encode(text)] if special else super().encode(text)

    writer = Adding(64)
    writer.vocab = replace(writer.vocab, bos=1, add_bos=True)
    assert Turns.of(writer) == Turns((1, 3), (END, 4), (END, 3))


def test_first_tokens_are_drawn_and_the_rest_is_greedy(net, tmp_path, monkeypatch):
    """No label among the drawn ones, as many as the seed says; without a chat template nobody else writes."""
    lead = 4
    monkeypatch.setattr("specnb.medusa.text._lead_of", lambda kind, rng: lead)
    rows = written(net, Writer(64, None), tmp_path, batches={"train": 3})
    first = rows.own.argmax(axis=1)
    drawn = 0
    for tokens, own, start in zip(rows.tokens, rows.own, first, strict=True):
        assert own[start:].all() and not own[:start].any()
        best = logits_of(net, tokens[None])[0].argmax(-1)
        drawn += int((best[start - lead - 1 : start - 1].numpy() != tokens[start - lead : start]).sum())
    assert drawn > len(first), "most of the drawn tokens are others than the best"


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ([1, 2, 3, 4] * 5, True),
        ([*range(40), *range(40), *range(8)], True),
        ([*range(40), *range(40)], False),  # once again is no loop yet
        ([*range(60), *range(60), *range(60)], False),  # longer than what is looked for
        ([1, 2, 3, 4] * 5 + [9], False),
        ([], False),
    ],
)
def test_loops(tokens, is_loop):
    assert text.loops(tokens) is is_loop
