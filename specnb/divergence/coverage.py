"""What an investigation looked at, and what it did not: a verdict is worth what it covers."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from specnb.divergence.align import Key
from specnb.divergence.setups import OWN, Outcome


@dataclass(frozen=True)
class Coverage:
    """Modules that ran and, of these, those of which something was `compared`; `left_out` are "module:role:name".

    `with_holder` are modules whose own outputs could not be compared, inside one whose outputs were: what they do wrong
    shows there (an activation that sees the tokens of one expert). `uncompared` are those of which nothing tells. Left
    out are tensors without a token axis or of other shapes (masks): what they do shows in what is made of them.
    `unread` are those that torch cannot read, with the reason. `seen_at_use` are those of the draft's parameters that
    an operation was seen to read: what a kernel of Triton or C++ looks up by itself is not.
    """

    modules: int
    uncompared: tuple[str, ...]
    with_holder: tuple[str, ...]
    never_called: tuple[str, ...]
    tensors: int
    left_out: tuple[str, ...]
    unread: tuple[str, ...]
    tokens: int
    parameters: int
    seen_at_use: int
    output: bool

    @classmethod
    def of(cls, outcome: Outcome, draft: nn.Module) -> "Coverage":
        """Of one set-up's run."""
        seen = outcome.trace.facts["modules"]
        left_out = [*outcome.along.left_out, *_reshaped(outcome)]
        ran = {*outcome.trace.tensors["module"]}
        compared = {*outcome.errors.loc[outcome.errors["role"] == "out", "at"]}
        # a wrapper that the pristine copy has not: what it gives is what a module inside gave
        gave = outcome.trace.rows(role="out").groupby("module")["digest"].agg(set)
        known = set().union(*(gave[one] for one in compared))
        compared |= {one for one in ran - compared if one in gave and gave[one] <= known}
        held = {one for one in ran - compared if any(holder in compared for holder in _holders(one))}
        params = outcome.trace.params
        read = {*params.loc[params["owner"] == OWN, "owner_path"]}
        own = [name for name, _ in draft.named_parameters()]
        return cls(
            modules=len(ran),
            uncompared=tuple(sorted(ran - compared - held)),
            with_holder=tuple(sorted(held)),
            never_called=tuple(seen["never_called"]),
            tensors=len(outcome.errors[["at", "call", "role", "name"]].drop_duplicates()),
            left_out=tuple(f"{key.module or 'model'}:{key.role}:{key.name}" for key in left_out),
            unread=tuple(f"{place} ({why})" for place, why in outcome.trace.facts.get("unread", {}).items()),
            tokens=len(outcome.along.text),
            parameters=len(own),
            seen_at_use=sum(name in read for name in own),
            output="" in compared,
        )

    @property
    def compared(self) -> int:
        return self.modules - len(self.uncompared) - len(self.with_holder)

    @property
    def complete(self) -> bool:
        """Whether every module that ran was compared, or one that holds it, and so was what the model gave."""
        return self.output and not self.uncompared

    def __str__(self) -> str:
        never = (
            f", {len(self.never_called)} never ran ({', '.join(self.never_called[:3])})" if self.never_called else ""
        )
        within = f", {len(self.with_holder)} with the one that holds them" if self.with_holder else ""
        not_seen = f", not {', '.join(self.uncompared[:3])}" if self.uncompared else ""
        return (
            f"{self.compared} of {self.modules} modules{within}{not_seen}{never}; {self.tensors} tensors at "
            f"{self.tokens} tokens, {len(self.left_out)} left out (other shapes); {self.seen_at_use} of "
            f"{self.parameters} parameters seen at use"
        )


def _holders(path: str) -> Iterator[str]:
    """The paths of the modules that hold one, the nearest first, without the model itself: that holds them all."""
    while path := path.rpartition(".")[0]:
        yield path


def _reshaped(outcome: Outcome) -> list[Key]:
    """Tensors along the text that came in another shape than the pristine copy has: attention weights over a window."""
    seen = {*outcome.errors[["at", "call", "role", "name"]].itertuples(index=False, name=None)}
    return [key for key in outcome.along.values if tuple(key) not in seen]
