"""llama.cpp while it computes, node by node (`cb_eval`), and ggml's tensors: those of a graph and those of a file.

The binding has no functions for tensors, so ggml's own are called, and what they do not tell is read from the memory of
a tensor as ggml.h of 0.3.36 lays it out. `ggml()` refuses a llama.cpp whose tensors have another size; a test proves
the layout of the one that requirements.txt names.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from specnb.errors import LoadError
from specnb.fetch import gguf_parts
from specnb.lm.gguf import binding
from specnb.lm.gguf.header import read_header

REMEDY = "install llama-cpp-python as requirements.txt does"
WEIGHTS = 1
"""GGML_BACKEND_BUFFER_USAGE_WEIGHTS."""
_MAX_DIMS, _MAX_SRC = 4, 10
OBJECT_BYTES = 32
"""Of the header that ggml puts before each tensor of a context."""
PLAIN = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i8": np.int8, "i16": np.int16, "i32": np.int32,
         "i64": np.int64}  # fmt: skip
"""ggml's types that are numbers in memory, as numpy has them; the others are blocks of quantised ones, or bf16."""
REORDERED = ("CPU", "AMX")
"""Names of buffers begin so that lie in plain memory, whatever they say: weights in the order that the kernels of this
processor want. ggml would end the process if it were asked to copy from one."""


class _Raw(ctypes.Structure):
    """struct ggml_tensor of ggml.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * _MAX_DIMS),
        ("nb", ctypes.c_size_t * _MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


_P, _S, _I = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_version": (_S, ()),
    "ggml_op_desc": (_S, (_P,)),
    "ggml_type_name": (_S, (_I,)),
    "ggml_nbytes": (ctypes.c_size_t, (_P,)),
    "ggml_tensor_overhead": (ctypes.c_size_t, ()),
    "ggml_backend_buffer_get_usage": (_I, (_P,)),
    "ggml_backend_buffer_is_host": (ctypes.c_bool, (_P,)),
    "ggml_backend_buffer_name": (_S, (_P,)),
    "ggml_backend_tensor_get": (None, (_P, _P, ctypes.c_size_t, ctypes.c_size_t)),
}


class Node:
    """A tensor of a graph under computation. Valid only while the callback that got it runs."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._ggml = ggml()
        self._raw = _Raw.from_address(address)

    @property
    def name(self) -> str:
        return self._raw.name.decode("utf-8", errors="replace")

    @property
    def op(self) -> str:
        """What computes it: `MUL_MAT`, `SILU`, …; `NONE` of weights, inputs and caches."""
        return self._ggml.ggml_op_desc(self.address).decode()

    @property
    def type(self) -> str:
        """ggml's name of the type: `f32`, `q8_0`, …"""
        return self._ggml.ggml_type_name(self._raw.type).decode()

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy counts axes (ggml the other way round), all four of them."""
        return tuple(reversed(self._raw.ne))

    @property
    def data(self) -> int:
        """Address of the first value; 0 where it has no memory."""
        return self._raw.data or 0

    @property
    def nbytes(self) -> int:
        """From the first value to the end of the last one."""
        return self._ggml.ggml_nbytes(self.address)

    @property
    def sources(self) -> list["Node"]:
        """What it is computed from, in ggml's order; places that are empty are left out."""
        return [Node(address) for address in self._raw.src if address]

    @property
    def base(self) -> "Node":
        """The tensor whose memory a view shows; itself where it is none."""
        return Node(self._raw.view_src) if self._raw.view_src else self

    @property
    def _buffer(self) -> int | None:
        return self.base._raw.buffer

    @property
    def buffer(self) -> str:
        """Name of the buffer that it lies in; "" where it has none."""
        return self._ggml.ggml_backend_buffer_name(self._buffer).decode() if self._buffer else ""

    @property
    def is_weight(self) -> bool:
        """Whether it is (a view of) a tensor of a model file."""
        return bool(self._buffer) and self._ggml.ggml_backend_buffer_get_usage(self._buffer) == WEIGHTS

    @property
    def _on_host(self) -> bool:
        return bool(self._buffer) and self._ggml.ggml_backend_buffer_is_host(self._buffer)

    @property
    def reordered(self) -> bool:
        """Whether it is a weight whose bytes are not in the order of the file."""
        return not self._on_host and self.buffer.startswith(REORDERED)

    def overlaps(self, other: "Node") -> bool:
        """Whether they share memory."""
        return self.data < other.data + other.nbytes and other.data < self.data + self.nbytes

    def raw_bytes(self) -> memoryview | bytes:
        """Its bytes as they lie there, of whatever type; a copy where they are on another device."""
        if self.data and (self._on_host or self.reordered):  # this process's own memory
            return memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.data)).cast("B")
        out = ctypes.create_string_buffer(self.nbytes)
        self._ggml.ggml_backend_tensor_get(self.address, out, 0, self.nbytes)
        return out.raw

    def values(self) -> np.ndarray | None:
        """Its values, axes as in `shape`; None for types that are no plain numbers.

        The array shows llama.cpp's memory where that can be: copy what is to outlive the callback.
        """
        dtype = PLAIN.get(self.type)
        if dtype is None or not self.data:
            return None
        return np.ndarray(self.shape, dtype, self.raw_bytes(), 0, tuple(reversed(self._raw.nb)))


class StoredWeights:
    """The tensors of a GGUF file (or of all parts of one), as their bytes lie there."""

    def __init__(self, path: Path) -> None:
        self._files = [(read_header(part), np.memmap(part, np.uint8, "r")) for part in gguf_parts(path)]

    def find(self, name: str) -> memoryview | None:
        """The bytes of the tensor of this name; None where there is none."""
        from gguf import GGML_QUANT_SIZES

        for header, content in self._files:
            if name in header.places:
                kind, start = header.places[name]
                values, n_bytes = GGML_QUANT_SIZES[kind]  # of a block
                return content[start : start + math.prod(header.shapes[name]) // values * n_bytes].data
        return None


class Decode(NamedTuple):
    """One llama_decode: its tokens (the last `padding` of them fill up), the position of the first, rows of logits."""

    ids: list[int]
    first: int
    rows: int
    padding: int


class Watch:
    """What is shown of a context's decodes: give it to `load` or `GgufModel.open`, then set the three functions.

    `wanted(node)` is asked of every node before it is computed; `seen(node)` is called after those it said yes to, with
    all that came before computed too. `begin(decode)` comes before both. Nothing is asked while `on` is False. What a
    function raises is raised after the decode, of which nothing more is shown; the model goes back to where it was.
    """

    def __init__(self) -> None:
        ggml()  # before a context is made: a callback cannot refuse
        self.on = False
        self.begin: Callable[[Decode], None] = lambda decode: None
        self.wanted: Callable[[Node], bool] = lambda node: False
        self.seen: Callable[[Node], None] = lambda node: None
        self._error: BaseException | None = None
        self._decoding = False
        # held here: llama.cpp calls it as long as the context lives
        self.callback = binding.library().api.ggml_backend_sched_eval_callback(self._called)

    @contextlib.contextmanager
    def decoding(self, ids: Sequence[int], first: int, rows: int, padding: int) -> Iterator[None]:
        """Around one llama_decode. Raises what one of the functions raised."""
        if not self.on:
            yield
            return
        self._error = None  # of a decode that failed by itself nobody took it
        self.begin(Decode([int(i) for i in ids], first, rows, padding))
        self._decoding = True
        try:
            yield
        finally:
            self._decoding = False
        if self._error is not None:
            raise self._error

    def _called(self, address: int, ask: bool, _user_data: object) -> bool:
        """An exception cannot pass through C: it is kept, and the rest of the graph computed in one piece."""
        if self._decoding and self._error is None:
            try:
                node = Node(address)
                if ask:
                    return bool(self.wanted(node))
                self.seen(node)
            except BaseException as error:  # an interrupt too
                self._error = error
        return not ask


@cache
def ggml() -> SimpleNamespace:
    """ggml's functions for tensors. Raises LoadError where one is missing or a tensor is laid out otherwise."""
    # the symbols of the libraries that libllama itself is linked with: a file loaded beside would be a second copy
    library = binding.library().api._lib
    functions = SimpleNamespace()
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = library[name]  # by index a new object: no one else's types are changed
        except AttributeError as error:
            raise LoadError(f"this llama.cpp has no {name}: {REMEDY}") from error
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    if functions.ggml_tensor_overhead() != OBJECT_BYTES + ctypes.sizeof(_Raw):
        raise LoadError(f"ggml {functions.ggml_version().decode()} lays tensors out otherwise than 0.25.3: {REMEDY}")
    return functions
