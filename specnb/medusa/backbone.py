"""What heads borrow of the model they sit on: its final norm, its lm_head, its embeddings; and which model it is."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.errors import InputError
from specnb.lm.hf_hidden import final_norm

SAMPLES = 64
"""Weights of each parameter that the digest looks at."""


@dataclass(frozen=True)
class Backbone:
    """Borrowed parts, never trained: `norm` is the final norm, `lm_head` and `embeddings` are `(vocab, hidden)`."""

    norm: nn.Module
    lm_head: Tensor
    embeddings: Tensor
    digest: str

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]

    @classmethod
    def of(cls, net: PreTrainedModel) -> "Backbone":
        """The parts of a causal LM of transformers.

        Raises InputError where the logits are more than lm_head(norm(hidden)), for then heads would be fed wrongly.
        """
        name = type(net).__name__
        output, embeddings = net.get_output_embeddings(), net.get_input_embeddings()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise InputError(f"heads need an lm_head that is a matrix without bias; that of {name} is {output!r:.100}")
        config = net.config.get_text_config(decoder=True)
        for setting in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, setting, None) not in (None, 1, 1.0):
                raise InputError(f"heads are not fed to a {setting} of {getattr(config, setting)}, which {name} has")
        return cls(
            final_norm(net), output.weight.detach(), embeddings.weight.detach()[: output.weight.shape[0]], digest(net)
        )


def digest(net: PreTrainedModel) -> str:
    """Which weights these are, in whatever type they are held: sha256 over the signs of SAMPLES of each parameter.

    Rounding to another type flips no sign (but float16 loses weights below 6e-8); another model, or a training step
    of some size, flips many.
    """
    state = hashlib.sha256()
    for name, parameter in sorted(net.named_parameters()):
        flat = parameter.detach().flatten()
        at = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
        signs = (flat[at.to(flat.device)] > 0).cpu().numpy()
        state.update(f"{name} {tuple(parameter.shape)} ".encode() + signs.tobytes())
    return state.hexdigest()
