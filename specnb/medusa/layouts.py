"""How heads lie in files: our own layout, and those of others, read and written.

A layout only says which name in a file is which weight, and what its config.json means; the weights decide how many
heads, blocks and lm_heads there are, for configs are known to be wrong (the original repository's says 2 heads where
5 are). Nothing is dropped and nothing invented: names left over are faults, and heads that a layout cannot hold are
refused when written. All but ours are fed the normed hidden state (`post_norm`); pre_norm heads are written as they
are, for behind the norm their input is the same. Whether everything is there, and fits, is asked in `checkpoint`.

- `specnb`: `heads.safetensors`, named as in `heads.Heads`; config.json is `HeadsConfig`.
- `note`: a single `.pt`, `heads.{i}.res_block.linear.*` and `heads.{i}.lm_head.weight`, and, where the heads were
  trained with a frozen norm of their own, `heads.{i}.norm.weight`.
- `medusa-v1`, `medusa-v2`: the original repository (Cai et al. 2401.10774), `medusa_lm_head.pt` with an lm_head a head,
  and `medusa_lm_head.safetensors` with blocks only, for a shared lm_head.
- `vllm`: `vllm_layout`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from specnb.errors import InputError
from specnb.medusa.backbone import Backbone
from specnb.medusa.heads import Heads
from specnb.medusa.source import CONFIG_FILE, Source
from specnb.medusa.stored import Layout, Names, Stored, checked, expected_shapes, lies, same_rounded, taken
from specnb.medusa.vllm_layout import Vllm
from specnb.medusa.writing import as_private, require_plain, with_bias, write_folder

NOTE = Names("heads.{head}.res_block.linear.{part}", "heads.{head}.lm_head.weight")
ORIGINAL = Names("{head}.{layer}.linear.{part}", "{head}.{n_layers}.weight")


@dataclass(frozen=True)
class Own:
    """Our own layout: every kind of heads, in the types they are held in."""

    file: str = "heads.safetensors"

    def matches(self, source: Source) -> bool:
        return source.file.name == self.file

    def read(self, source: Source, backbone: Backbone) -> Stored:
        if not source.config.values:
            raise InputError(f"no {CONFIG_FILE} beside {source.file}: without it nobody knows what the heads are fed")
        config = checked(source.config.values, source.config.path)
        names = {name: name for name in expected_shapes(config)}
        tensors, faults = taken(source, names)
        return Stored(config, tensors, names, faults=tuple(faults))

    def write(self, heads: Heads, folder: Path) -> tuple[str, ...]:
        write_folder(folder, self.file, heads.state_dict(), heads.config.model_dump())
        return ()


@dataclass(frozen=True)
class Note:
    """The `.pt` of the benchmark that measured random heads: Linear blocks with bias, an lm_head for each head."""

    file: str = "medusa_heads.pt"

    def matches(self, source: Source) -> bool:
        return bool(NOTE.blocks_in(source.tensors))

    def read(self, source: Source, backbone: Backbone) -> Stored:
        config = NOTE.config_of(source, backbone)
        norms = {f"heads.{i}.norm.weight" for i in range(config.n_heads)}
        found = sorted(norms & source.tensors.keys())
        names = NOTE.of(config)
        tensors, faults = taken(source, names, norms)
        if not found:
            said = "no norm inside: the heads are fed the normed hidden state"
            return Stored(config, tensors, names, (said,), tuple(faults))
        if len(found) < len(norms):
            faults.append(f"a norm is in {len(found)} of {config.n_heads} heads: in all or none")
        weight = backbone.norm.weight
        faults += [
            f"{name!r} is not the backbone's final norm: the heads were trained on another model, or it was not frozen"
            for name in found
            if source.tensors[name].shape != weight.shape or not same_rounded(source.tensors[name], weight)
        ]
        config = config.model_copy(update={"input": "pre_norm"})
        said = "each head has the frozen norm inside: the heads are fed the hidden state in front of it"
        return Stored(config, tensors, names, (said,), tuple(faults))

    def write(self, heads: Heads, folder: Path) -> tuple[str, ...]:
        require_plain(heads, "note")
        if heads.config.n_layers > 1:
            raise InputError(f"the layout note has one block a head, these have {heads.config.n_layers}: take vllm")
        state, said = with_bias(*as_private(heads))
        config = heads.config.model_copy(update={"lm_head": "private", "bias": True})
        facts = {"num_heads": heads.config.n_heads, "base_model_name_or_path": heads.config.backbone_name}
        write_folder(folder, self.file, {theirs: state[ours] for ours, theirs in NOTE.of(config).items()}, facts)
        return said


@dataclass(frozen=True)
class Original:
    """The original repository: `private` lm_heads (v1), or blocks only (v2)."""

    title: str
    file: str
    private: bool

    def matches(self, source: Source) -> bool:
        found = ORIGINAL.blocks_in(source.tensors)
        return bool(found) and bool(ORIGINAL.lm_heads_in(source.tensors)) == self.private

    def read(self, source: Source, backbone: Backbone) -> Stored:
        config = ORIGINAL.config_of(source, backbone)
        names = ORIGINAL.of(config)
        tensors, faults = taken(source, names)
        keys = {"medusa_num_heads": "n_heads", "medusa_num_layers": "n_layers"}
        return Stored(config, tensors, names, tuple(lies(source, config, keys)), tuple(faults))

    def write(self, heads: Heads, folder: Path) -> tuple[str, ...]:
        require_plain(heads, self.title)
        own = heads.config
        if own.lm_head == "private" and not self.private:
            raise InputError(f"{self.title} has no room for the heads' own lm_heads: take medusa-v1")
        if any(not _equal(head.blocks) for head in heads.heads):
            raise InputError(
                f"{self.title} runs one block {own.n_layers} times, and these heads have different ones: take vllm"
            )
        state, said = with_bias(*(as_private(heads) if self.private else (dict(heads.state_dict()), ())))
        config = own.model_copy(update={"bias": True, "lm_head": "private" if self.private else "shared"})
        facts = {
            "medusa_num_heads": own.n_heads,
            "medusa_num_layers": own.n_layers,
            "base_model_name_or_path": own.backbone_name,
        }
        facts |= {} if self.private else {"version": "2"}
        write_folder(folder, self.file, {theirs: state[ours] for ours, theirs in ORIGINAL.of(config).items()}, facts)
        return said


def _equal(blocks: torch.nn.ModuleList) -> bool:
    first = blocks[0].state_dict()
    return all(torch.equal(tensor, first[name]) for block in blocks for name, tensor in block.state_dict().items())


LAYOUTS: dict[str, Layout] = {
    "specnb": Own(),
    "note": Note(),
    "medusa-v1": Original("medusa-v1", "medusa_lm_head.pt", private=True),
    "medusa-v2": Original("medusa-v2", "medusa_lm_head.safetensors", private=False),
    "vllm": Vllm(),
}


def layout_of(source: Source) -> str:
    """The name of the layout of a file. Raises InputError, with some of the names in it, when it is none of ours."""
    found = next((name for name, layout in LAYOUTS.items() if layout.matches(source)), None)
    if found is None:
        names = ", ".join(sorted(source.tensors)[:5])[:300]
        raise InputError(f"{source.file} is in none of the layouts {', '.join(LAYOUTS)}: it has {names}, …")
    return found
