"""Recorders of transformers' recurrent layers: what the strategies `snapshots` and `replay` go back by.

A layer's mixer calls its recurrence as a function of its module, and hands its states to the cache. So nothing of
transformers is changed: a mixer of *this* model gets a forward in which that one name means our listening function.
The recurrences: gated delta rule (Yang et al. 2412.06464, section 3.1; `torch_chunk_gated_delta_rule` in
models/qwen3_next/modeling_qwen3_next.py), Mamba-2's scan (Dao and Gu 2405.21060, section 6; models/mamba2).
The convolution's window needs none of this: a cache layer that records its past keeps all columns, and is cut.
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
"""Recurrences of transformers 5.23: the function for blocks, and the one for single tokens."""

STEPWISE_UP_TO = 5
"""Blocks so short run faster step by step on a CPU: the function for blocks pads them to 64 tokens."""


DeltaInputs = namedtuple("DeltaInputs", "key value g beta")
"""What entered a gated delta rule: k `(1, n, k_heads, dk)`, v `(1, n, heads, dv)`, g, beta `(1, n, heads, …)`."""
ScanInputs = namedtuple("ScanInputs", "x dt B")
"""What entered a diagonal scan: x `(1, n, heads, dim)`, dt `(1, n, heads)` as projected, B `(1, n, groups, N)`."""
Inputs = DeltaInputs | ScanInputs


class TorchRecorder(Recorder):
    """The bookkeeping of both: the state at the border, the windows, and how many tokens were recorded since.

    A subclass has `_install`, which changes the mixers; `_recorded`, all tensors kept; `_forget_from(n_kept)`, and
    `_state_at(index, base, n_kept)`: the state of a layer after the first `n_kept` tokens.
    """

    spans_forwards = True

    def __init__(self, engine: TorchEngine, depth: int) -> None:
        self.depth = depth
        self._engine = engine
        self.base: SavedState | None = None
        """The state that recording began with."""
        self._mixers = {module.layer_idx: module for module in engine.model.modules() if _writes_state(module)}
        if any("forward" in vars(mixer) for mixer in self._mixers.values()):
            raise InputError("this torch model is listened to already: close the other model that runs it, or copy it")
        self._install()

    @property
    def recording(self) -> bool:
        return self.base is not None and self._engine.feeding

    @property
    def reach(self) -> int:
        return self._engine.n_held - self.base.n_tokens if self.base else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state at the border, of what was recorded since, and of what entered the convolutions."""
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
                LinearAttentionCacheLayerMixin.crop(layer, 0)  # cuts the window to the width that it needs
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
                layer.recurrent_states[0].copy_(self._state_at(index, states[0], n_kept) if n_kept else states[0])
        self._engine.crop(n)
        self._forget_from(n_kept)

    def uninstall(self):
        self.stop()
        for mixer in self._mixers.values():
            mixer.__dict__.pop("forward", None)


class ActivationRecorder(TorchRecorder):
    """Keeps what entered each recurrence; going back runs the kept tokens through the recurrence alone.

    Raises InputError for families whose recurrence is not a function of its own.
    """

    def _install(self) -> None:
        if self._engine.steps != "blocks":
            raise InputError("this family runs token by token, which replay does not repeat: use rollback=snapshots")
        self._inputs, self._options, self._replays = defaultdict(list), {}, {}
        blocks = {index: _recurrence(mixer) for index, mixer in self._mixers.items()}  # all, before any is changed
        for index, block in blocks.items():
            if block:
                mixer, step = self._mixers[index], (DELTA_RULES | SCANS)[block]
                of = inspect.unwrap(type(mixer).forward).__globals__
                hear = self._hear_delta if block in DELTA_RULES else self._hear_scan
                _rebind(mixer, hear(index, block, of[block], step, of[step]))

    def _hear_delta(self, index: int, block: str, run_block: Callable, step: str, run_step: Callable) -> Mapping:
        def heard(query, key, value, g, beta, initial_state=None, **options):
            self._record(index, DeltaInputs(key, value, g, beta))
            self._options[index] = {"use_qk_l2norm_in_kernel": options.get("use_qk_l2norm_in_kernel", False)}
            run = run_step if initial_state is not None and key.shape[1] <= STEPWISE_UP_TO else run_block
            return run(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)

        def replay(state, inputs):
            k, v, g, beta = inputs  # the query only reads the state: any will do
            options = self._options[index]
            return run_step(k, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options)[1]

        self._replays[index] = replay
        return {block: heard, step: heard}

    def _hear_scan(self, index: int, block: str, run_block: Callable, step: str, run_step: Callable) -> Mapping:
        def heard_block(x, dt, A, B, C, **options):
            self._record(index, ScanInputs(x, dt, B))
            self._options[index] = options | {"A": A}
            return run_block(x, dt, A, B, C, **options)

        def heard_step(state, x, dt, A, B, *rest, **options):
            # here dt comes repeated along the head
            self._record(index, ScanInputs(x[:, None], dt[:, None, :, 0], B[:, None]))
            return run_step(state, x, dt, A, B, *rest, **options)

        def replay(state, inputs):
            options = self._options[index] | {"initial_states": state, "return_final_states": True, "D": None}
            return run_block(inputs.x, inputs.dt, B=inputs.B, C=inputs.B, **options)[1]

        self._replays[index] = replay
        return {block: heard_block, step: heard_step}

    def _record(self, index: int, inputs: Inputs) -> None:
        if self.recording:
            self._inputs[index].append(type(inputs)(*(tensor.clone() for tensor in inputs)))

    def _recorded(self) -> Sequence[torch.Tensor]:
        return [tensor for calls in self._inputs.values() for call in calls for tensor in call]

    def _forget_from(self, n_kept: int) -> None:
        for calls in self._inputs.values():
            calls[:] = [_first(calls, n_kept)] if n_kept and calls else []

    def _state_at(self, index: int, base: torch.Tensor, n_kept: int) -> torch.Tensor:
        return self._replays[index](base, _first(self._inputs[index], n_kept)).to(base.dtype)


class StateRecorder(TorchRecorder):
    """Keeps the recurrent state after every position: mixers take recorded blocks token by token.

    All else (projections of attention, MLPs, the head) still sees the whole block, so that this also runs families
    whose mixers forget their state in blocks.
    """

    def _install(self) -> None:
        self._states = defaultdict(list)
        self._steps, self._engine.steps = self._engine.steps, "blocks"
        for index, mixer in self._mixers.items():
            mixer.forward = self._stepped(index, mixer.forward)

    def _stepped(self, index: int, forward: Callable) -> Callable:
        def stepped(hidden_states, *args, **kwargs):
            alone = self._steps == "single" or (self._steps == "later" and self._engine.n_held)
            if not (self.recording or alone):
                return forward(hidden_states, *args, **kwargs)
            outs = []
            for token in hidden_states.split(1, dim=1):
                outs.append(forward(token, *args, **kwargs))
                if self.recording and (state := self._engine.cache.layers[index].recurrent_states[0]) is not None:
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


def _names(mixer: torch.nn.Module) -> tuple[str, ...]:
    return inspect.unwrap(type(mixer).forward).__code__.co_names


def _recurrence(mixer: torch.nn.Module) -> str:
    """Return the name of its recurrence for blocks, "" for a mixer that only convolves; InputError for an unknown."""
    names = _names(mixer)
    recurrence = next((block for block in DELTA_RULES | SCANS if block in names), "")
    if not recurrence and "update_recurrent_state" in names:
        raise InputError(f"{type(mixer).__name__} has no recurrence that can be replayed: use rollback=snapshots")
    return recurrence


def _writes_state(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and "update_conv_state" in _names(module)


def _rebind(mixer: torch.nn.Module, names: Mapping[str, Callable]) -> None:
    """Give `mixer` a forward of its own, in which `names` mean other functions; its module and class stay the same."""
    forward = inspect.unwrap(type(mixer).forward)
    scope = {**forward.__globals__, **names}
    heard = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    heard.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(heard, mixer)


def _first(calls: Sequence[Inputs], n: int) -> Inputs:
    """Return the inputs of the first `n` tokens of several calls, as one."""
    return type(calls[0])(*(torch.cat(parts, dim=1)[:, :n] for parts in zip(*calls, strict=True)))
