"""Training text: the backbone's own draws, resumed to the bit, in turns, no repeat among what is learned from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.hidden import final_norm
from specnb.lm.vocab import Vocabulary
from specnb.medusa import data
from specnb.medusa.data import Turns, Writing
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

    def __init__(self, network=None, template: str | None = TEMPLATE) -> None:
        pieces = (b"", b"", b"<end>", b"<user>", b"<assistant>", *(bytes([97 + i % 26]) for i in range(59)))
        self.vocab = Vocabulary(pieces, eog=frozenset({END}), special=frozenset({END, 3, 4}), chat_template=template)
        self.network = network

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [CONTROL.get(c, 5 + ord(c) % 59) for c in text]


@pytest.fixture(scope="module")
def net():
    return torch_model("llama", vocab_size=64, max_position_embeddings=128).eval()


def written(writer, folder, batches=2, **changed):
    data.write_splits(writer, folder, batches={"train": batches}, writing=WRITING, **changed)
    return data.read(folder, "train")


@torch.inference_mode()
def logits_of(net, tokens):
    return net(torch.from_numpy(tokens.astype(np.int64))).logits


@pytest.mark.parametrize("kind", ["llama", "mamba", "gpt2"])
def test_own_tokens_are_drawn_from_the_rows_and_states_are_the_layers(tmp_path, kind, monkeypatch):
    """Also of families that keep their state otherwise; states as near as bfloat16 rounds."""
    monkeypatch.setattr(data, "DRAWING_TEMPERATURE", 1e-4)  # then what is drawn is the best
    net = torch_model(kind, vocab_size=64, max_position_embeddings=128).eval()
    rows = written(Writer(net), tmp_path)
    assert rows.tokens.shape == (6, WRITING.length) and 0 < rows.n_own < rows.tokens.size
    logits = logits_of(net, rows.tokens)
    chosen = logits[:, :-1].gather(-1, torch.from_numpy(rows.tokens[:, 1:, None].astype(np.int64)))[..., 0]
    assert (chosen - logits[:, :-1].amax(-1))[torch.from_numpy(rows.own[:, 1:])].min() > -1e-3
    states = data.read_states(tmp_path, "train", range(5)).float()
    assert torch.equal(data.read_states(tmp_path, "train", [4, 1]), states[:, :, [4, 1]].bfloat16())
    with torch.inference_mode():
        from_states = net.get_output_embeddings()(final_norm(net)(states[:, :, -1]))
        layers = net(torch.from_numpy(rows.tokens.astype(np.int64)), output_hidden_states=True).hidden_states[1:]
    assert (from_states - logits).abs().max() < 0.02 * logits.abs().max()
    for at, layer in enumerate(data.tapped_layers(2)):
        assert layer or torch.allclose(states[:, :, at], layers[0], atol=0.02 * float(layers[0].abs().max()))


def test_texts_to_begin_with_are_on_one_side_of_the_split():
    train, held_out = (data.read_library(split) for split in data.SPLITS)
    for kind in ("code", "prose"):
        assert len(train[kind]) > 10 * len(held_out[kind]) > 0 and not {*train[kind]} & {*held_out[kind]}


def test_turns_are_written_as_the_template_writes_them(net, tmp_path, monkeypatch):
    turns, bare = Turns.of(Writer()), Writer.encode
    assert (turns.opening, turns.to_answer, turns.to_request) == ((3,), (END, 4), (END, 3))
    rows = written(Writer(net), tmp_path)
    roles = 0
    for tokens, own in zip(rows.tokens, rows.own, strict=True):
        for at in range(WRITING.longest_seed, WRITING.length - 1):  # END hands over, so what follows it is a role
            if tokens[at - 1] == END and not own[at]:
                roles += 1
                assert tokens[at] in ROLE.values()
    assert roles, "rows hold turns beside the first"
    for after in ((), (END,)):
        monkeypatch.setattr(Writer, "encode", lambda self, text, bare=bare, after=after: [1, *bare(self, text), *after])
        writer = Writer()
        writer.vocab = replace(writer.vocab, bos=1, add_bos=True)
        assert Turns.of(writer) == Turns((1, 3), (END, 4), (END, 3)), "a BOS before the chat, and nothing after a part"


def test_a_stopped_run_goes_on_to_the_same_text(net, tmp_path):
    whole = written(Writer(net), tmp_path / "whole", 3)

    def interrupt(done, total, _what):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(Writer(net), tmp_path / "parts", 3, progress=interrupt)
    assert whole.digest() == written(Writer(net), tmp_path / "parts", 3).digest()
    with pytest.raises(InputError, match="other settings"):
        written(Writer(torch_model("llama", vocab_size=64, seed=9)), tmp_path / "whole")


def test_what_stood_in_the_row_before_is_no_example_and_ends_a_message():
    """Eight tokens that come again are a repeat, and a seed is nobody's; without a template nobody else writes."""
    row, circle = data.GrowingRow(data.Seed("prose", (7, 8)), WRITING), list(range(10, 22))
    own = [row.append(token, None, {END}) for token in [7, 8, *circle, *circle, 30, 31]]
    assert own == [False] * 2 + [True] * 19 + [False] * 5 + [True] * 2
    long = WRITING._replace(longest_answer=1000)
    row, turns = data.GrowingRow(data.Seed("prose", (7,)), long), Turns((3,), (END, 4), (END, 3))
    n = next(
        i for i in range(1000) if row.append(7 if not i else circle[i % 12], turns, {END}) is None or row.forced[1:]
    )
    assert row.forced == [END, 3] and 12 + data.LONGEST_REPEAT <= n <= 24 + data.LONGEST_REPEAT and not row.answering


def test_the_draft_vocabulary_is_what_the_backbone_wrote_most_often():
    tokens = np.array([[5, 5, 5, 9, 9, 1, 7]], dtype=np.int32)
    rows = data.TextRows(tokens, np.array([[True] * 6 + [False]]))
    assert data.most_frequent(rows, 2, 10).tolist() == [5, 9]
    assert data.most_frequent(rows, 5, 10).tolist() == [0, 1, 5, 7, 9], "7 was not its own, 0 is not in the text"
