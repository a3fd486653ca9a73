"""False-alarm controls: real runs in which nothing is wrong, so that no module may be named.

Sound runs differ in many ways: block sizes, batches, kernels, cache slots, dtype. A tool that names
a module in one of them costs its users days of search for a fault that does not exist.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn
from torch.nn import functional

from specnb.divergence.capture import capture
from specnb.divergence.errors import judge_errors, locate, noise_floors
from specnb.divergence.faults.planting import Around, replace_forward, replaced
from specnb.divergence.investigate import judge_service
from specnb.divergence.pair import copy_of
from specnb.divergence.parts import find
from specnb.divergence.script import Script, feed_script
from specnb.divergence.setups import Deploy, Lab, local_errors
from specnb.divergence.trace import Alignment, ModuleTrace
from tests.benchmarks.divergence_score.grid import Subject, lab_row, others
from tests.benchmarks.divergence_score.rows import NOTHING

ROWS = 3
"""Number of equal rows in the batch."""
BLOCK_SIZE, POOL_BLOCKS = 16, 64
"""Positions per block; blocks in a layer's pool of slots, which caches of several models share."""


class Ran(NamedTuple):
    """The lab's judgment of a control, the run for the other tools, and the lab with its runs."""

    told: dict[str, Any]
    run: Alignment
    lab: Lab


Control = Callable[[Subject], Ran]


def controlled(subject: Subject, name: str) -> list[dict[str, Any]]:
    """Return the rows of one control."""
    ran = CONTROLS[name](subject)
    told = [ran.told, *others(ran.run, ran.lab)]
    return [
        subject.row("control", name, expected=NOTHING, expected_cause="PRECISION_ONLY", **one)
        for one in told
    ]


def _judged(
    lab: Lab, deploy: Deploy | None = None, setups: Sequence[str] | None = ("S0", "S3")
) -> Ran:
    found = judge_service(lab, deploy=deploy, setups=setups)
    same_script = [one for one in found.outcomes.values() if not one.setup.in_blocks]
    return Ran(lab_row(found), same_script[-1].run, lab)


def _served(service: Deploy) -> Control:
    """Run the draft in this service, alone and next to the target."""
    return lambda subject: _judged(subject.lab, service)


def _untouched(subject: Subject) -> Ran:
    """Run every default set-up, unchanged."""
    return _judged(subject.lab, setups=None)


def _width(width: int) -> Control:
    """Feed blocks of another width than that of the lab's noise floors; 0: the whole text."""

    def control(subject: Subject) -> Ran:
        lab = copy.copy(subject.lab)
        lab.script = Script.blocks(lab.script.text, width=width or len(lab.script.text))
        with capture(lab.reference, at_use=False, states=True) as builder:
            logits = tuple(feed_script(lab.reference, lab.script))
        lab.sound = [lab.script.align(builder.trace()), lab.sound[1]]
        lab.sound_logits = [logits, lab.sound_logits[1]]
        return _judged(lab)

    return control


def _batch(subject: Subject) -> Ran:
    """Run ROWS equal rows in one forward pass, and compare the first."""
    lab, draft = subject.lab, subject.pair.draft
    with capture(draft, states=True) as builder:
        feed_script(_Rows(draft), lab.script)
    aligned = lab.script.align(_first_row(builder.trace()))
    wrong = locate(judge_errors(local_errors(lab.reference, aligned), lab.floor, aligned.last_step))
    return Ran(_told(wrong), aligned, lab)


def _told(wrong: pd.DataFrame) -> dict[str, Any]:
    if wrong.empty:
        return {"verdict": "PRECISION_ONLY"}
    first = wrong.iloc[0]
    named = {"module": first["module"], "position": int(first["position"])}
    return {"verdict": "DIVERGENT", "structural": True} | named


class _Rows(nn.Module):
    """Feed a model a batch of ROWS copies of a row."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.model(input_ids=input_ids.expand(ROWS, -1), **options)


def _first_row(trace: ModuleTrace) -> ModuleTrace:
    """Return the first row of each tensor: of (batch, …) or (batch * length, …)."""
    first = {
        digest: value[: max(1, len(value) // ROWS)] if value.ndim else value
        for digest, value in trace.arrays.items()
    }
    tensors = trace.tensors.assign(
        shape=[first[digest].shape for digest in trace.tensors["digest"]]
    )
    return replace(trace, arrays=first, tensors=tensors)


def _renamed(subject: Subject) -> Ran:
    """Run the draft inside a wrapper, as engines do: other paths, the same modules."""
    lab = copy.copy(subject.lab)
    lab.draft = _Wrapped(subject.pair.draft)
    return _judged(lab)


class _Wrapped(nn.Module):
    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft_model = draft

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.draft_model(input_ids=input_ids, **options)


def _ties(subject: Subject) -> Ran:
    """Give two tokens the same logit and two experts the same score: either choice is right."""
    draft = copy_of(subject.pair.draft)
    with torch.no_grad():
        draft.lm_head.weight[1] = draft.lm_head.weight[0]
        for _, router in find(draft)["router"]:
            router.weight[1], router.bias[1] = router.weight[0], router.bias[0]
    return _judged(Lab(draft, subject.pair.target, script=subject.lab.script), setups=None)


def _against_float32(subject: Subject) -> Ran:
    """Compare a run with other kernels and sound runs, in the draft's dtype, with float32.

    Sound runs, replayed in float32, differ by the rounding of their dtype. The run may differ as
    much, but no more.
    """
    lab = copy.copy(subject.lab)
    lab.reference = copy_of(lab.reference).float()
    lab.floor = noise_floors([local_errors(lab.reference, sound) for sound in lab.sound], lab.dtype)
    return _judged(lab, experts_run("batched_mm"), ("S0",))


# --- services that change how a draft runs, with equivalent results -------------------------------


def experts_run(implementation: str) -> Deploy:
    """Return a service that configures another implementation of experts."""
    return lambda draft, neighbour: swapped(draft.config, "_experts_implementation", implementation)


@contextmanager
def all_run(modules: Iterable[nn.Module], around: Callable[[nn.Module], Around]) -> Iterator[None]:
    """Replace the forward pass of each module by what `around` returns for it."""
    with ExitStack() as planted:
        for module in modules:
            planted.enter_context(replace_forward(module, around(module)))
        yield


def linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def other_products(draft: nn.Module, neighbour: nn.Module | None) -> AbstractContextManager[None]:
    """Let linear layers compute in the other dtype: bfloat16 for float32, and vice versa."""
    return all_run(linear(draft), _in_other_dtype)


def paged(first_slot: int) -> Deploy:
    """Store keys and values in blocks of a pool, from `first_slot` on and in reverse order.

    As with a paged cache, attention gets them gathered by position: the slots must not matter.
    """
    return lambda draft, neighbour: all_run(
        dict(find(draft)["attention"]).values(), lambda _: _from_slots(first_slot)
    )


def _in_other_dtype(linear: nn.Linear) -> Around:
    other = torch.bfloat16 if linear.weight.dtype == torch.float32 else torch.float32
    weights = [
        None if one is None else one.detach().to(other) for one in (linear.weight, linear.bias)
    ]

    def run(original: Any, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states.to(other), *weights).to(states.dtype)

    return run


def _from_slots(first_slot: int) -> Around:
    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None:  # a neighbor that verifies without a cache
            return original(*args, **kwargs)
        update = cache.update

        def placed(*more: Any, **options: Any) -> tuple[torch.Tensor, ...]:
            return tuple(_gathered(rows, first_slot) for rows in update(*more, **options))

        with replaced(cache, "update", placed):
            return original(*args, **kwargs)

    return run


def _gathered(rows: torch.Tensor, first_slot: int) -> torch.Tensor:
    """Write rows `(batch, heads, positions, size)` to their slots; return them read by position."""
    positions = torch.arange(rows.shape[-2])
    last_block = first_slot // BLOCK_SIZE + int(positions[-1]) // BLOCK_SIZE
    slots = (last_block - positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    pool = torch.full(
        (*rows.shape[:2], POOL_BLOCKS * BLOCK_SIZE, rows.shape[-1]), float("nan"), dtype=rows.dtype
    )
    pool[:, :, slots] = rows
    return pool[:, :, slots]


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute temporarily; `setattr` also handles properties, parameters and modules."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


CONTROLS: Mapping[str, Control] = MappingProxyType(
    {
        "untouched": _untouched,
        "width 1": _width(1),
        "width 7": _width(7),
        "one forward": _width(0),
        f"batch of {ROWS}": _batch,
        "slots from 176": _served(paged(176)),
        "slots from 336": _served(paged(336)),
        "experts in batched products": _served(experts_run("batched_mm")),
        "experts in grouped products": _served(experts_run("grouped_mm")),
        # no forward pass reads it
        "other temperature": _served(
            lambda draft, _: swapped(draft.generation_config, "temperature", 0.3)
        ),
        "renamed modules": _renamed,
        "exact ties": _ties,
        "against float32": _against_float32,
        "products in the other dtype": _served(other_products),
    }
)
"""Controls by name. `uniform_offset` and `split_k` are planted with the faults."""
