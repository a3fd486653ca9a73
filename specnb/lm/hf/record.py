"""Recorders of transformers' recurrent layers, for the strategies `snapshots` and `replay`.

A layer's mixer calls its recurrence as a function of its Python module, and stores the state in the
cache. transformers itself is not patched: the mixers of *this* model get a `forward` in which the
function's name refers to a recording wrapper. Recurrences: gated delta rule (Yang et al.
2412.06464, section 3.1; `torch_chunk_gated_delta_rule` in
models/qwen3_next/modeling_qwen3_next.py), Mamba-2's scan (Dao and Gu 2405.21060, section 6;
models/mamba2). The convolution needs no wrapper: a cache layer that records its past keeps all
columns of the window, and rollback truncates them.
"""

import inspect
from collections import defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specnb.errors import InputError
from specnb.lm.hf.engine import SavedState, TorchEngine, recurrent_layers
from specnb.lm.rollback import Recorder

DELTA_RULES = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
SCANS = {"mamba2_chunk_scan": "mamba2_selective_state_update"}
"""Recurrences in transformers 5.23: the function for blocks, and the one for single tokens."""

STEPWISE_UP_TO = 5
"""Longest block that a CPU runs faster token by token: the block function pads to 64 tokens."""


DeltaInputs = namedtuple("DeltaInputs", "key value g beta")
"""Inputs of a gated delta rule: k `(1, n, k_heads, dk)`, v `(1, n, heads, dv)`, g and beta
`(1, n, heads, …)`."""
ScanInputs = namedtuple("ScanInputs", "x dt B")
"""Inputs of a diagonal scan: x `(1, n, heads, dim)`, projected dt `(1, n, heads)`, B
`(1, n, groups, N)`."""
Inputs = DeltaInputs | ScanInputs


class TorchRecorder(Recorder):
    """Base class: saves the state at the boundary, and rolls back recurrent states and windows.

    A subclass implements `_install` (wrap the mixers), `_recorded` (all recorded tensors),
    `_forget_from(n_kept)` (discard later tokens) and `_state_at(index, base, n_kept)` (the state of
    a layer after the first `n_kept` tokens).
    """

    spans_forwards = True

    def __init__(self, engine: TorchEngine, depth: int) -> None:
        self.depth = depth
        self._engine = engine
        self.base: SavedState | None = None
        """The state when recording started."""
        mixers = filter(_is_mixer, engine.model.modules())
        self._mixers = {mixer.layer_idx: mixer for mixer in mixers}
        if any("forward" in vars(mixer) for mixer in self._mixers.values()):
            raise InputError(
                "this torch model already has a recorder: close the other model that runs it, or "
                "copy it"
            )
        self._install()

    @property
    def recording(self) -> bool:
        return self.base is not None and self._engine.feeding

    @property
    def reach(self) -> int:
        return self._engine.n_held - self.base.n_tokens if self.base else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state at the boundary, of the recorded tensors, and of the windows."""
        if self.base is None:
            return 0
        tensors = [*self._recorded()]
        for index, layer in recurrent_layers(self._engine.cache):
            tensors += [*layer.conv_states.values(), *self.base.layers[index][1].values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def begin(self):
        self.stop()
        for _, layer in recurrent_layers(self._engine.cache):
            layer.record_past = True
        self.base = self._engine.save()

    def stop(self):
        for _, layer in recurrent_layers(self._engine.cache):
            if layer.record_past:
                LinearAttentionCacheLayerMixin.crop(layer, 0)  # truncate the window to its width
                layer.record_past = False
        self.base = None
        self._forget_from(0)

    @torch.inference_mode()
    def take_back(self, n):
        n_kept = self.reach - n
        for index, layer in recurrent_layers(self._engine.cache):
            conv, states = self.base.layers[index]
            for i, window in layer.conv_states.items():
                if window is not None:
                    layer.conv_states[i] = window[..., : conv[i].shape[-1] + n_kept]
            if states[0] is not None:
                layer.recurrent_states[0].copy_(
                    self._state_at(index, states[0], n_kept) if n_kept else states[0]
                )
        self._engine.crop(n)
        self._forget_from(n_kept)

    def uninstall(self):
        self.stop()
        for mixer in self._mixers.values():
            mixer.__dict__.pop("forward", None)


class ActivationRecorder(TorchRecorder):
    """Records the inputs of each recurrence; rollback runs the recurrence over accepted tokens.

    Raises InputError for families whose recurrence is not a separate function.
    """

    def _install(self) -> None:
        if self._engine.steps != "blocks":
            raise InputError(
                "this family runs token by token, which replay does not support: use "
                "rollback=snapshots"
            )
        self._inputs = defaultdict(list)
        self._options = {}
        self._replays = {}
        # check all mixers before changing any
        blocks = {index: _recurrence(mixer) for index, mixer in self._mixers.items()}
        for index, block in blocks.items():
            if block:
                mixer = self._mixers[index]
                step = (DELTA_RULES | SCANS)[block]
                functions = inspect.unwrap(type(mixer).forward).__globals__
                wrap = self._wrap_delta if block in DELTA_RULES else self._wrap_scan
                wrapped = wrap(index, functions[block], functions[step])
                _rebind(mixer, dict(zip((block, step), wrapped, strict=True)))

    def _wrap_delta(self, index: int, run_block: Callable, run_step: Callable) -> list[Callable]:
        def recorded(query, key, value, g, beta, initial_state=None, **options):
            self._record(index, DeltaInputs(key, value, g, beta))
            self._options[index] = {
                "use_qk_l2norm_in_kernel": options.get("use_qk_l2norm_in_kernel", False)
            }
            run = (
                run_step
                if initial_state is not None and key.shape[1] <= STEPWISE_UP_TO
                else run_block
            )
            return run(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)

        def replay(state, inputs):
            k, v, g, beta = inputs  # any query will do: it does not change the state
            options = self._options[index]
            return run_step(
                k, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options
            )[1]

        self._replays[index] = replay
        return [recorded, recorded]

    def _wrap_scan(self, index: int, run_block: Callable, run_step: Callable) -> list[Callable]:
        def recorded_block(x, dt, A, B, C, **options):
            self._record(index, ScanInputs(x, dt, B))
            self._options[index] = options | {"A": A}
            return run_block(x, dt, A, B, C, **options)

        def recorded_step(state, x, dt, A, B, *rest, **options):
            # here dt is repeated along the head dimension
            self._record(index, ScanInputs(x[:, None], dt[:, None, :, 0], B[:, None]))
            return run_step(state, x, dt, A, B, *rest, **options)

        def replay(state, inputs):
            options = self._options[index] | {
                "initial_states": state,
                "return_final_states": True,
                "D": None,
            }
            return run_block(inputs.x, inputs.dt, B=inputs.B, C=inputs.B, **options)[1]

        self._replays[index] = replay
        return [recorded_block, recorded_step]

    def _record(self, index: int, inputs: Inputs) -> None:
        if self.recording:
            self._inputs[index].append(inputs._make(tensor.clone() for tensor in inputs))

    def _recorded(self) -> Sequence[torch.Tensor]:
        return [tensor for calls in self._inputs.values() for call in calls for tensor in call]

    def _forget_from(self, n_kept: int) -> None:
        for calls in self._inputs.values():
            calls[:] = [_first(calls, n_kept)] if n_kept and calls else []

    def _state_at(self, index: int, base: torch.Tensor, n_kept: int) -> torch.Tensor:
        return self._replays[index](base, _first(self._inputs[index], n_kept)).to(base.dtype)


class StateRecorder(TorchRecorder):
    """Records the recurrent state after every token: mixers run recorded blocks token by token.

    All other modules (attention, MLPs, the head) run on the whole block. This also works for
    families whose mixers ignore their state in blocks.
    """

    def _install(self) -> None:
        self._states = defaultdict(list)
        self._steps = self._engine.steps
        self._engine.steps = "blocks"
        for index, mixer in self._mixers.items():
            mixer.forward = self._stepped(index, mixer.forward)

    def _stepped(self, index: int, forward: Callable) -> Callable:
        def stepped(hidden_states, *args, **kwargs):
            stepwise = self._steps == "single" or (self._steps == "later" and self._engine.n_held)
            if not (self.recording or stepwise):
                return forward(hidden_states, *args, **kwargs)
            outs = []
            for token in hidden_states.split(1, dim=1):
                outs.append(forward(token, *args, **kwargs))
                if (
                    self.recording
                    and (state := self._engine.cache.layers[index].recurrent_states[0]) is not None
                ):
                    self._states[index].append(state.clone())
            return torch.cat(outs, dim=1)

        return stepped

    def uninstall(self):
        super().uninstall()
        self._engine.steps = self._steps

    def _recorded(self) -> Sequence[torch.Tensor]:
        return [state for states in self._states.values() for state in states]

    def _forget_from(self, n_kept: int) -> None:
        for states in self._states.values():
            del states[n_kept:]

    def _state_at(self, index: int, base: torch.Tensor, n_kept: int) -> torch.Tensor:
        return self._states[index][n_kept - 1]


def _called_names(mixer: torch.nn.Module) -> tuple[str, ...]:
    return inspect.unwrap(type(mixer).forward).__code__.co_names


def _recurrence(mixer: torch.nn.Module) -> str:
    """Return the name of the recurrence for blocks, "" for a mixer with a convolution only.

    Raises InputError for an unknown recurrence.
    """
    names = _called_names(mixer)
    recurrence = next((block for block in DELTA_RULES | SCANS if block in names), "")
    if not recurrence and "update_recurrent_state" in names:
        raise InputError(
            f"{type(mixer).__name__} has no recurrence that can be replayed: use rollback=snapshots"
        )
    return recurrence


def _is_mixer(module: torch.nn.Module) -> bool:
    """Return whether the module updates a recurrent layer's state."""
    has_index = isinstance(getattr(module, "layer_idx", None), int)
    return has_index and "update_conv_state" in _called_names(module)


def _rebind(mixer: torch.nn.Module, functions: Mapping[str, Callable]) -> None:
    """Replace `forward` of this mixer by a copy in which the names in `functions` are rebound."""
    forward = inspect.unwrap(type(mixer).forward)
    scope = {**forward.__globals__, **functions}
    code = forward.__code__
    copy = FunctionType(code, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(copy, mixer)


def _first(calls: Sequence[Inputs], n: int) -> Inputs:
    """Return the concatenated inputs of the first `n` tokens of several calls."""
    return calls[0]._make(torch.cat(parts, dim=1)[:, :n] for parts in zip(*calls, strict=True))
