"""Random networks in which norms and biases have an effect, and tokens for them."""

import numpy as np
import torch

from tests.tiny_models import VOCAB, torch_model

IDS = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 60)]


@torch.no_grad()
def network(kind, dtype=torch.float32, **config):
    """Return `torch_model` with norms and biases that differ from feature to feature."""
    net = torch_model(kind, **config).to(dtype).eval()
    for parameter in net.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)).to(dtype))
    return net
