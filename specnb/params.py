"""Parameters of the notebooks: one frozen, validated model for each.

Field names and defaults equal those of the notebook's `parameters` cell (a test compares them), so
sliders, papermill and plain calls are validated in the same way. Sizes that are not set follow the
`budget`: quick takes minutes on a slow machine, normal uses the defaults below, and full gives
intervals narrow enough to quote.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specnb.errors import InputError, require_known
from specnb.io import comma_list, validated
from specnb.prompts import PACKS, categories
from specnb.registry import DRAFTERS

Temperature = Annotated[float, Field(ge=0, le=100)]
"""Sampling temperature; 0 is greedy."""
Tokens = Annotated[int, Field(ge=2)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = NonNegativeInt
DraftLength = Annotated[int, Field(ge=1, le=256)]
Width = Annotated[int, Field(ge=1, le=64)]
"""Draft tokens that the target verifies in one forward pass."""
Categories = Annotated[
    list[str],
    BeforeValidator(lambda names: comma_list(names) if isinstance(names, str) else names),
    Field(min_length=1, validate_default=True),
]
"""A list, or a string with commas."""
Item = TypeVar("Item")
NonEmpty = Annotated[list[Item], Field(min_length=1)]
Budget = Literal["quick", "normal", "full"]
BUDGET = "SPECNB_BUDGET"
"""Environment variable that overrides the `budget` of a notebook's cell."""


class Params(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """Base class of all parameter models.

    Unknown names, values of another type, and duplicates in lists are rejected. `prompts` is a
    JSONL file or a pack (humaneval, mt-bench) that replaces the shipped prompts. It is declared
    before `categories` or `contents`, whose default then stands for all of its categories.
    """

    @field_validator("*")
    @classmethod
    def _refuse_duplicates(cls, value: Any) -> Any:
        """A generation listed twice would count as two prompts and make intervals too narrow."""
        for item in value if isinstance(value, list) else ():
            if value.count(item) > 1:
                raise ValueError(f"{item!r} is listed twice")
        return value

    @field_validator("prompts", check_fields=False)
    @classmethod
    def _read_prompts(cls, source: int | str) -> int | str:
        """Read a file or pack before a model is loaded; a number counts shipped prompts."""
        if isinstance(source, str) and source:
            if source not in PACKS:
                source = os.path.abspath(os.path.expanduser(source))  # noqa: PTH100, PTH111
            categories(source)
        return source

    @field_validator("categories", "contents", check_fields=False)
    @classmethod
    def _check_categories(cls, names: list[str], info: ValidationInfo) -> list[str]:
        source = info.data.get("prompts")
        if source is None:  # it was invalid
            return names
        available = categories(source)
        if source and names == cls.model_fields[info.field_name].default:
            return list(available)
        for name in names:
            require_known("prompt category", name, available)
        return names

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Validate `values`. Raises one readable InputError instead of pydantic's report."""
        return validated(cls, values, f"parameters of {cls.__name__}")


def sized(quick: Any, normal: Any, full: Any = None) -> Any:
    """Declare a field whose default depends on the budget; by default `full` equals `normal`."""
    full = normal if full is None else full
    return Field(default=normal, json_schema_extra={"quick": quick, "full": full})


class NotebookParams(Params):
    """Base class of the notebooks' parameters. `sized` fields that are None follow the `budget`.

    `sizes` maps their names to the values at `quick` and `full`; the field's default is for normal.

    Fields that several notebooks share are documented here:

    - target: a model name as in `specnb.load`
    - backend, dtype: the engine, torch (hf) or llama.cpp (llama), and the type of the weights in
      torch; empty: as in the target's name; dtype `auto`: the fastest on this machine
    - drafters: names in `registry.DRAFTERS`, or draft models
    - k: the draft length; k_max: the largest replayed draft length
    - temperatures: sampling temperatures; 0 is greedy
    - prompts_per_category: the number of prompts of each of `categories`
    - live_prompts: how many of these also run live
    - max_new_tokens: length limit of a generated text

    >>> budgets = ("quick", "normal", "full")
    >>> [KSweepParams.checked(budget=budget).prompts_per_category for budget in budgets]
    [1, 20, 20]
    """

    sizes: ClassVar[dict[str, Any]] = {}

    budget: Budget = "normal"
    seed: int = Field(default=0, ge=0, lt=2**63)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        cls.sizes = {name: extra for name, extra in extras.items() if extra}

    @model_validator(mode="before")
    @classmethod
    def _fill_sizes(cls, values: dict[str, Any]) -> dict[str, Any]:
        budget = str(values.get("budget"))
        sizes = {name: size[budget] for name, size in cls.sizes.items() if budget in size}
        return sizes | {
            name: value
            for name, value in values.items()
            if value is not None or name not in cls.sizes
        }

    @classmethod
    def from_cell(cls, names: Mapping[str, Any]) -> Self:
        """Build from the notebook's `globals()`: use the fields, ignore all other names.

        The environment variable `SPECNB_BUDGET` overrides the cell's budget. Raises InputError that
        lists missing fields or invalid values.
        """
        if missing := [
            name for name in cls.model_fields if name not in {*names, *cls.sizes, "budget"}
        ]:
            raise InputError(f"the parameters cell does not define {', '.join(missing)}")
        values = {name: names[name] for name in cls.model_fields if name in names}
        if budget := os.environ.get(BUDGET):
            values["budget"] = budget
        return cls.checked(**values)


class StartParams(NotebookParams):
    """Notebook 00: how does speculative decoding work, and which notebook answers your question?"""

    trace: str = "data/traces/smollm2-135m"
    """Folder with recordings: a shipped trace, or a run of notebook 09."""
    prompt: str = "edit-02"
    """Id of a prompt in `trace`."""
    temperature: Temperature = 0.0
    """A temperature in `trace`."""
    k: DraftLength = 3
    look_at: Count = 7
    """Number of the round that is shown in detail, from 1."""
    target: str = "smollm2-135m"
    """Model of the timed runs at the end, which use `n_prompts` and `max_new_tokens`."""
    backend: Literal["hf", "llama"] = "hf"
    n_prompts: Count = sized(1, 5, 10)
    """Number of prompts: `prompt` and others of its category."""
    max_new_tokens: Tokens = sized(24, 64, 128)


class KSweepParams(NotebookParams):
    """Notebook 01: which draft length K pays, for each temperature and content?

    >>> KSweepParams.checked(k_max=0)
    Traceback (most recent call last):
        ...
    specnb.errors.InputError: parameters of KSweepParams: k_max = 0: Input should be greater than or equal to 1
    """  # noqa: E501

    target: str = "smollm2-135m"
    backend: str = Field(default="hf", pattern="^(hf|llama|)$")
    dtype: str = Field(default="auto", pattern="^(auto|int4|float32|bfloat16|float16|)$")
    drafter: str = "lookup"
    """Drafter that runs live and is replayed: a name in `registry.DRAFTERS`, or a draft model."""
    replayed: list[str] = ["hydra", "medusa"]
    """More drafters, replayed only; those that do not fit the target are skipped."""
    k_max: Width = 24
    ks: NonEmpty[DraftLength] = sized([3], [3, 7])
    """Draft lengths that run live."""
    temperatures: NonEmpty[Temperature] = [0.0, 0.7]
    prompts: str = ""
    categories: Categories = ["code", "edit", "json", "prose", "general"]
    prompts_per_category: Count = sized(1, 20, 20)
    pack_prompts: CountOrZero = sized(0, 30, 60)
    """Number of prompts of each benchmark pack (HumanEval, MT-bench)."""
    live_prompts: Count = sized(1, 3, 5)
    max_new_tokens: Tokens = sized(16, 64, 128)
    conversations: CountOrZero = sized(1, 14, 20)
    """Number of multi-turn conversations."""
    contexts: list[Tokens] = sized([256], [256, 2048])
    """Context lengths (tokens) at which forward passes for several sequences are timed."""
    rule: Literal["token", "block", "typical"] = "token"
    """Verification rule above temperature 0; `typical` is lossy."""

    _sort_ks = field_validator("ks")(sorted)

    @model_validator(mode="after")
    def _typical_needs_sampling(self) -> Self:
        if self.rule == "typical" and 0 in self.temperatures:
            raise ValueError("the rule typical needs temperatures above 0; at 0, greedy is used")
        return self


class AdaptiveKParams(NotebookParams):
    """Notebook 02: should K adapt during generation, and which controller is best?"""

    target: str = "smollm2-135m:f16"
    drafters: NonEmpty[str] = ["lookup", "smollm2-135m:q4_0"]
    machines: list[str] = ["memory-bound server", "laptop, compute-bound", "96-core EPYC"]
    """Machines to simulate: names of `measure.cost.NAMED`, or files of data/machines."""
    prompts: str = ""
    categories: Categories = ["code", "json", "prose", "general", "edit"]
    prompts_per_category: Count = sized(1, 5, 8)
    live_prompts: CountOrZero = sized(1, 2)
    live_contents: CountOrZero = sized(1, 6)
    """Number of `categories`, from the first, whose prompts also run live with every controller."""
    conversations: CountOrZero = sized(1, 2, 3)
    """Number of conversations whose answers switch between prose, code and JSON."""
    max_new_tokens: Tokens = sized(16, 64)
    k_max: int = Field(default=24, ge=24)


class CompatibilityParams(NotebookParams):
    """Notebook 03: will this draft model work with that target, and what if it does not?"""

    models: list[str] = Field(
        min_length=2,
        default=[
            *("smollm2", "qwen2", "qwen2.5", "qwen3", "qwen3.5", "deepseek-r1-distill-qwen"),
            *("deepseek-v4", "gpt-2", "gpt-neox", "mpt", "falcon", "phi-3", "gemma-4", "bert-bge"),
        ],
    )
    """Vocabularies to compare with one another, by any name that `specnb compat` accepts."""
    target: str = "smollm2-135m:f32"
    draft: str = "gpt-2"
    """Draft vocabulary, compared with `target` in detail; it runs if it has weights."""
    draft_model: str = "smollm2-135m:q4_0"
    """Model whose text is tokenized with the vocabulary of `draft`, and of each of `families`."""
    families: list[str] = ["qwen2.5", "phi-3"]
    pairs: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = [
        ["qwen2.5-coder-32b", "qwen2.5-0.5b-instruct"],
        ["deepseek-r1-distill-qwen-32b", "pard-deepseek-r1-distill-qwen-1.5b"],
        ["deepseek-r1-distill-qwen-32b", "deepseek-r1-distill-qwen-1.5b"],
        ["deepseek-r1-distill-qwen-32b", "qwen2.5-0.5b-instruct"],
        ["qwen3-coder-480b-a35b-instruct", "pard-qwen3-0.6b"],
        ["qwen3-coder-480b-a35b-instruct", "qwen3-0.6b"],
        ["qwen3-next-80b-a3b-instruct", "pard-qwen3-0.6b"],
    ]
    """The field report's pairs of target and drafter."""
    prompts: str = ""
    categories: Categories = ["code", "prose"]
    prompts_per_category: Count = sized(1, 3, 6)
    k: DraftLength = 4
    temperature: Temperature = 0.0
    max_new_tokens: Tokens = sized(24, 64)


class RollbackParams(NotebookParams):
    """Notebook 04: how is a recurrent state rolled back exactly, and what does it cost?"""

    target: str = "tiny-hybrid"
    engines: NonEmpty[Literal["llama", "torch"]] = ["llama", "torch"]
    draft: str = "tiny-hybrid-draft"
    """Draft model, measured in addition to prompt lookup in the first of `engines`."""
    ks: NonEmpty[Width] = [2, 6]
    """Draft lengths."""
    acceptance: NonEmpty[Annotated[float, Field(ge=0, le=1)]] = [0.0, 0.8]
    """Probabilities that an oracle's draft token is correct, given that those before it are."""
    prompts: str = ""
    """A JSONL file or a pack; by default held-out passages of code."""
    passages: Count = sized(1, 12, 16)
    """Number of prompts."""
    prompt_tokens: Tokens = 64
    """Length to which prompts are truncated."""
    max_new_tokens: Tokens = sized(8, 32, 128)
    memory_models: NonEmpty[str] = ["qwen3-next", "mamba-2.8b"]
    """Models whose state size is computed: names in state_memory.toml, folders, or hf:ORG/NAME."""


class MedusaParams(NotebookParams):
    """Notebook 05: are these heads trained, loaded and verified correctly, and are they faster?"""

    target: str = "smollm2-135m"
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16)$")
    medusa: str = "smollm2-135m-medusa"
    """Medusa heads for `target`."""
    hydra: str = "smollm2-135m-hydra"
    """Hydra heads for `target`."""
    prompts: str = ""
    categories: Categories = ["code", "edit", "prose"]
    prompts_per_category: Count = sized(1, 5, 8)
    max_new_tokens: Annotated[int, Field(ge=4)] = sized(16, 32)
    identity_prompts: Count = sized(1, 3)
    """Number of prompts whose speculative output is compared with plain decoding in float32."""
    rows: Tokens = sized(16, 48, 64)
    """Number of rows for training, and as many held-out rows; the target generates them."""
    row_tokens: Annotated[int, Field(ge=32)] = sized(32, 64)
    """Tokens in a row."""
    steps: Annotated[int, Field(ge=6)] = sized(10, 30, 40)
    """Training steps of the short trainings."""
    ablation_steps: Tokens = sized(3, 12, 16)
    """Training steps of each ablation."""


class LeagueParams(NotebookParams):
    """Notebook 07: on equal terms, which trained or untrained drafter pays on this machine?"""

    target: str = "smollm2-135m"
    backend: Literal["hf", "llama"] = "hf"
    dtype: str = Field(default="auto", pattern="^(auto|int4|float32|bfloat16|float16|)$")
    drafters: NonEmpty[str] = sized(["auto", "suffix", "jump"], [*DRAFTERS])
    """Drafters and draft models; those that do not fit the target are skipped."""
    prompts: str = ""
    categories: Categories = ["code", "edit", "prose"]
    temperatures: NonEmpty[Temperature] = sized([0.0], [0.0, 0.7])
    prompts_per_category: Count = sized(1, 5, 12)
    pack_prompts: CountOrZero = sized(0, 5, 12)
    """Number of prompts of each benchmark pack (HumanEval, MT-bench)."""
    live_prompts: CountOrZero = sized(1, 2, 5)
    max_new_tokens: Tokens = sized(12, 48, 128)
    k_max: Width = 16


class DivergenceParams(NotebookParams):
    """Notebook 06: acceptance is 0 % and nothing crashes: which module, which token, and why?"""

    fault: str = "positional_registry"
    """Fault to plant, a name in divergence/faults."""
    layer: int = Field(default=-1, ge=-1)
    """Layer of the fault; -1: the fault's default layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    tokens: int = Field(default=24, ge=8)
    """Length of the text that the draft model processes: the prompt, then rounds with rollbacks."""
    prompt_tokens: Count = 14
    """Length of the prompt, which is processed in one forward pass."""
    k: Width = 3
    gallery: list[str] = sized(["positional_registry", "split_k"], [])
    """Faults shown in the second part; empty: all."""


class LosslessParams(NotebookParams):
    """Notebook 08: does speculative decoding generate the target's output?"""

    target: str = "smollm2-135m:f32"
    draft: str = "smollm2-135m:q4_0"
    k: Width = 4
    temperature: float = Field(default=0.7, gt=0, le=100)
    """Temperature of the sampled runs."""
    prompts: Count | str = sized(3, 12, 24)
    """Number of shipped prompts, or a JSONL file or pack."""
    max_new_tokens: Count = sized(24, 64)
    texts: str = "shipped"
    """Greedy texts of other engines: a JSONL file, or `shipped` (of the default target)."""
    other: str = ""
    """The target in the engine or type that wrote `texts`, if these are a JSONL file."""


class ExplorerParams(NotebookParams):
    """Notebook 09: what is the speed with another K, drafter, temperature, content or machine?

    For each prompt, one text is generated at every temperature, and one more with `top_p` at the
    highest. Every drafter is recorded along each text.

    >>> ExplorerParams.checked(temperatures=[0.0, 0.5]).samplings
    ((0.0, 1.0), (0.5, 1.0), (0.5, 0.9))
    """

    trace: str = "auto"
    """`auto` (shipped if all parameters are the quick defaults, else new), `new`, or as in 00."""
    target: str = "smollm2-135m"
    drafters: NonEmpty[str] = ["lookup", "self"]
    prompts: str = ""
    contents: Categories = ["code", "edit", "prose"]
    """Categories of the prompts."""
    temperatures: NonEmpty[Temperature] = sized([0.0, 0.7], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    top_p: float = Field(default=0.9, gt=0, le=1)
    """Nucleus sampling, as one more setting at the highest temperature; 1: off."""
    prompts_per_category: Count = sized(3, 5, 12)
    max_new_tokens: Tokens = sized(32, 48)
    k_max: DraftLength = 24
    """Length of the longest recorded draft."""

    @property
    def samplings(self) -> tuple[tuple[float, float], ...]:
        """(temperature, top_p) of every setting to record; top_p has no effect at temperature 0."""
        samplings = [(temperature, 1.0) for temperature in self.temperatures]
        if any(self.temperatures) and self.top_p < 1:
            samplings.append((max(self.temperatures), self.top_p))
        return tuple(samplings)


class ServerParams(NotebookParams):
    """Notebook 10: does speculation pay on a running server, and at which K?"""

    server: str = ""
    """URL of the server; if empty, a recording of llama.cpp's server is shown."""
    plain: str = ""
    """URL of a server with the same target and no draft."""
    target: str = ""
    """The server's model, loaded locally to judge greedy texts that differ from plain decoding."""
    prompts: str = ""
    prompts_per_category: Count = sized(1, 5)
    max_new_tokens: Tokens = sized(32, 64)
    timeout_s: float = Field(default=120.0, gt=0)
    """Maximum seconds for a reply."""
