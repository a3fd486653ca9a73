"""Whose parameters were read, by how things stood before the draft was put into service.

A service that hands the draft another model's weights makes them the draft's own: they are its attributes then, and
where their memory lies says nothing. What tells is which object was whose before, and whose values they are; of values
that the draft has somewhere itself, nothing.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from specnb.divergence.at_use import Owned, Registry, version_of
from specnb.divergence.trace import Trace


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by path, tied ones under each of their paths: a service may untie them."""
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


class Before:
    """The parameters and buffers of draft and neighbour, as they were before the service began.

    `meant` are the digests of the draft's by their path, `tag` and `other` the tags of the two models.
    """

    def __init__(
        self, draft: nn.Module, neighbour: nn.Module | None, *, meant: Mapping[str, str], tag: str, other: str
    ) -> None:
        self._meant, self._own, self._other = meant, tag, other
        mine = held(draft)
        shared = {id(tensor) for tensor in mine.values()}  # by both, as they were loaded: the draft's
        neighbours = {} if neighbour is None else dict((*neighbour.named_parameters(), *neighbour.named_buffers()))
        self._theirs = {path: tensor for path, tensor in neighbours.items() if id(tensor) not in shared}
        self._stamps = {path: _stamp(tensor) for path, tensor in self._theirs.items()}
        self._forms = {path: _form(tensor) for path, tensor in mine.items()}

    def told_apart(self, trace: Trace) -> Trace:
        """The trace with the neighbour as the owner of what was read of it under a name of the draft's."""
        params, objects = trace.params, {id(tensor): path for path, tensor in self._theirs.items()}
        of_draft = params["owner"] == self._own
        changed = of_draft & (params["digest"] != params["owner_path"].map(self._meant)) & (params["digest"] != "")
        paths = params["object_id"].map(objects).astype(object).where(of_draft)
        if (unknown := changed & paths.isna()).any():
            content = self._by_content({*params.loc[unknown, "owner_path"]})
            paths = paths.fillna(params["digest"].map(content).astype(object).where(unknown))
        has_path = paths.notna()
        labelled = params.assign(
            owner=params["owner"].mask(has_path, self._other), owner_path=params["owner_path"].mask(has_path, paths)
        )
        return replace(trace, params=labelled)

    def _by_content(self, paths: set[str]) -> dict[str, str]:
        """The neighbour's parameters by their digest, of the form of these of the draft's.

        Without those that were changed since, and values that are nobody's, or the draft's as well.
        """
        forms, registry, digests = {self._forms.get(path) for path in paths}, Registry({}), {*self._meant.values()}
        alike = {
            registry.digest(Owned(self._other, path, tensor)): path
            for path, tensor in self._theirs.items()
            if _form(tensor) in forms and _stamp(tensor) == self._stamps[path] and _telling(tensor)
        }
        return {digest: path for digest, path in alike.items() if digest not in digests}


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when torch writes into it, or its memory is exchanged."""
    try:
        return version_of(tensor), tensor.data_ptr()
    except RuntimeError:  # a wrapper without memory of its own
        return version_of(tensor), 0


def _telling(tensor: torch.Tensor) -> bool:
    """Whether it has more than one value: all zeros, or ones, are nobody's. Told by bytes: some types know no `!=`."""
    try:
        values = tensor.detach().flatten().view(torch.uint8).view(-1, tensor.element_size())
        return bool((values != values[:1]).any())
    except (RuntimeError, TypeError, NotImplementedError):  # a wrapper, or on meta
        return False
