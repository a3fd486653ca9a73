"""What a notebook may be told: one frozen, validated model per notebook.

The field names and defaults are those of the notebook's `parameters` cell (a test compares them), so the slider,
papermill and a plain call go through the same checks. What each is for stands in the notebook, under Parameters. Sizes
that are not given follow the `budget`: quick ends in minutes on a slow machine, normal is the models' own defaults,
full has intervals worth quoting.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from specnb.errors import InputError
from specnb.io import comma_list, validated
from specnb.prompts import PACKS, categories

Temperature = Annotated[float, Field(ge=0, le=100)]
"""0 is greedy."""
Tokens = Annotated[int, Field(ge=2)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = NonNegativeInt
DraftLength = Annotated[int, Field(ge=1, le=256)]
Width = Annotated[int, Field(ge=1, le=64)]
"""Drafts of which the target checks all in one forward."""
Categories = Annotated[
    list[str],
    BeforeValidator(lambda names: comma_list(names) if isinstance(names, str) else names),
    Field(min_length=1, validate_default=True),
]
"""May be a text with commas."""
Item = TypeVar("Item")
Some = Annotated[list[Item], Field(min_length=1)]
Budget = Literal["quick", "normal", "full"]
BUDGET = "SPECNB_BUDGET"
"""Variable of the environment that overrides the `budget` of a notebook's cell."""


class Params(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """Base of all parameter models: no unknown names, no silent change of a value, nothing listed twice.

    `prompts` names a JSONL file or a pack (humaneval, mt-bench) in place of the shipped ones, and comes before
    `categories` or `contents`: left at their default, they are then those of the file.
    """

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        """The same generation twice would count as two prompts, and make intervals too narrow."""
        for item in value if isinstance(value, list) else ():
            if value.count(item) > 1:
                raise ValueError(f"{item!r} is listed twice")
        return value

    @field_validator("prompts", check_fields=False)
    @classmethod
    def _readable_anywhere(cls, source: int | str) -> int | str:
        """Every line is read here, before a model is opened; a number is how many of the shipped."""
        if isinstance(source, str) and source:
            source = source if source in PACKS else os.path.abspath(os.path.expanduser(source))  # noqa: PTH100, PTH111
            categories(source)
        return source

    @field_validator("categories", "contents", check_fields=False)
    @classmethod
    def _those_of_the_prompts(cls, names: list[str], info: ValidationInfo) -> list[str]:
        source = info.data.get("prompts")  # None where it was refused
        known = names if source is None else categories(source)
        if source and names == cls.model_fields[info.field_name].default:
            return list(known)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no prompts of the category {unknown[0]!r}; there are {', '.join(known)}")
        return names

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Validate; one readable InputError instead of pydantic's report."""
        return validated(cls, values, f"parameters of {cls.__name__}")


def sized(quick: Any, normal: Any, full: Any = None) -> Any:
    """A field whose value the budget chooses; at full that of normal, where no other is given."""
    return Field(default=normal, json_schema_extra={"quick": quick, "full": normal if full is None else full})


class NotebookParams(Params):
    """Base of the notebooks' models: what is `sized`, and is None or absent, follows the `budget`.

    `sizes` maps each such field to its values at `quick` and at `full`; the field's default is that of normal.

    >>> [KSweepParams.checked(budget=budget, ks=[4]).prompts_per_category for budget in ("quick", "normal", "full")]
    [1, 5, 12]
    """

    sizes: ClassVar[dict[str, Any]] = {}

    budget: Budget = "normal"
    seed: int = Field(default=0, ge=0, lt=2**63)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = cls.model_fields.items()
        cls.sizes = {name: field.json_schema_extra for name, field in fields if field.json_schema_extra}

    @model_validator(mode="before")
    @classmethod
    def _by_budget(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in values.items() if value is not None or name not in cls.sizes}
        budget = str(values.get("budget"))
        return {name: size[budget] for name, size in cls.sizes.items() if budget in size} | given

    @classmethod
    def from_cell(cls, names: Mapping[str, Any]) -> Self:
        """Build from the notebook's `globals()`: takes the fields, ignores everything else.

        The environment's `SPECNB_BUDGET` overrides the cell's. Raises InputError that names each bad value.
        """
        missing = [name for name in cls.model_fields if name not in {*names, *cls.sizes, "budget"}]
        if missing:
            raise InputError(f"the parameters cell does not define {', '.join(missing)}")
        values = {name: names[name] for name in cls.model_fields if name in names}
        if budget := os.environ.get(BUDGET):
            values["budget"] = budget
        return cls.checked(**values)


class StartParams(NotebookParams):
    """Notebook 00: what does speculative decoding do to a text, and where does each question go?"""

    trace: str = "data/traces/smollm2-135m"
    prompt: str = "edit-02"
    temperature: Temperature = 0.0
    k: DraftLength = 8
    look_at: Count = 4
    target: str = "smollm2-135m"
    backend: Literal["hf", "llama"] = "hf"
    n_prompts: Count = sized(1, 5, 10)
    max_new_tokens: Tokens = sized(24, 64, 128)


class KSweepParams(NotebookParams):
    """Notebook 01: which draft length K pays, per temperature and content?

    >>> KSweepParams.checked(k_max=0)
    Traceback (most recent call last):
        ...
    specnb.errors.InputError: parameters of KSweepParams: k_max = 0: Input should be greater than or equal to 1
    """

    target: str = "smollm2-135m"
    backend: str = Field(default="hf", pattern="^(hf|llama|)$")
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16|)$")
    drafter: str = "lookup"
    replayed: list[str] = ["self", "medusa"]
    k_max: Width = 24
    ks: Some[DraftLength] = sized([4], [4, 12])
    temperatures: Some[Temperature] = [0.0, 0.7]
    prompts: str = ""
    categories: Categories = ["code", "edit", "json", "prose", "general"]
    prompts_per_category: Count = sized(1, 5, 12)
    pack_prompts: CountOrZero = sized(0, 30, 60)
    live_prompts: Count = sized(1, 3, 5)
    max_new_tokens: Tokens = sized(16, 128, 256)
    conversations: CountOrZero = sized(1, 3, 6)
    contexts: list[Tokens] = sized([256], [256, 2048, 8000])
    rule: Literal["token", "block", "typical"] = "token"

    _in_order = field_validator("ks")(sorted)

    @model_validator(mode="after")
    def _typical_needs_sampling(self) -> Self:
        if self.rule == "typical" and 0 in self.temperatures:
            raise ValueError("the rule typical needs temperatures above 0: at 0 the greedy rule is used")
        return self


class AdaptiveKParams(NotebookParams):
    """Notebook 02: does it pay to change K while generating, and which controller does it best?"""

    target: str = "smollm2-135m:f16"
    drafters: Some[str] = ["lookup", "smollm2-135m:q4_0"]
    machines: list[str] = ["memory-bound server", "laptop, compute-bound", "96-core EPYC"]
    prompts: str = ""
    categories: Categories = ["code", "json", "prose", "general", "edit"]
    prompts_per_category: Count = sized(1, 5, 8)
    live_prompts: CountOrZero = 1
    live_contents: CountOrZero = sized(1, 6)
    conversations: CountOrZero = sized(1, 2, 3)
    max_new_tokens: Tokens = sized(16, 64)
    k_max: int = Field(default=24, ge=24)


class CompatibilityParams(NotebookParams):
    """Notebook 03: will this draft model work with that target, and what comes of it when it does not fit?"""

    models: list[str] = Field(min_length=2, default=[
        "smollm2", "qwen2", "qwen2.5", "qwen3", "qwen3.5", "deepseek-r1-distill-qwen", "deepseek-v4", "gpt-2",
        "gpt-neox", "mpt", "falcon", "phi-3", "gemma-4", "bert-bge",
    ])  # fmt: skip
    target: str = "smollm2-135m:f32"
    draft: str = "gpt-2"
    draft_model: str = "smollm2-135m:q4_0"
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
    prompts: str = ""
    categories: Categories = ["code", "prose"]
    prompts_per_category: Count = sized(1, 2, 6)
    k: DraftLength = 4
    temperature: Temperature = 0.0
    max_new_tokens: Tokens = sized(24, 64)


class RollbackParams(NotebookParams):
    """Notebook 04: how does a recurrent state go back, exactly, and what does it cost?"""

    target: str = "tiny-hybrid"
    engines: Some[Literal["llama", "torch"]] = ["llama", "torch"]
    draft: str = "tiny-hybrid-draft"
    ks: Some[Width] = [2, 6]
    acceptance: Some[Annotated[float, Field(ge=0, le=1)]] = [0.0, 0.8]
    prompts: str = ""
    passages: Count = sized(1, 5, 12)
    prompt_tokens: Tokens = 64
    max_new_tokens: Tokens = sized(8, 16, 24)
    memory_models: Some[str] = ["qwen3-next", "mamba-2.8b"]


class MedusaParams(NotebookParams):
    """Notebook 05: do these heads work, trained, loaded, verified and faster; and if not, which fault is it?"""

    target: str = "smollm2-135m"
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16)$")
    medusa: str = "smollm2-135m-medusa"
    hydra: str = "smollm2-135m-hydra"
    prompts: str = ""
    categories: Categories = ["code", "edit", "prose"]
    prompts_per_category: Count = sized(1, 5, 8)
    max_new_tokens: Annotated[int, Field(ge=4)] = sized(24, 32)
    identity_prompts: Count = sized(1, 3)
    rows: Tokens = sized(24, 48, 64)
    row_tokens: Annotated[int, Field(ge=32)] = sized(32, 64)
    steps: Annotated[int, Field(ge=6)] = sized(10, 30, 40)
    ablation_steps: Tokens = sized(3, 12, 16)


LEAGUE = ["auto", "suffix", "lookup", "jump", "eagle", "hydra", "medusa", "self", "exit", "skip"]


class LeagueParams(NotebookParams):
    """Notebook 07: which drafter pays on this machine, trained and untrained, on equal terms?"""

    target: str = "smollm2-135m"
    backend: Literal["hf", "llama"] = "hf"
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16|)$")
    drafters: Some[str] = sized(["auto", "suffix", "jump"], LEAGUE)
    prompts: str = ""
    categories: Categories = ["code", "edit", "prose"]
    temperatures: Some[Temperature] = sized([0.0], [0.0, 0.7])
    prompts_per_category: Count = sized(1, 5, 12)
    pack_prompts: CountOrZero = sized(0, 5, 12)
    live_prompts: CountOrZero = sized(1, 2, 5)
    max_new_tokens: Tokens = sized(12, 64, 128)
    k_max: Width = 16


class DivergenceParams(NotebookParams):
    """Notebook 06: acceptance is 0 %, nothing crashes: which module is it, which token, and why?"""

    fault: str = "positional_registry"
    layer: int = Field(default=-1, ge=-1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    tokens: int = Field(default=24, ge=8)
    prompt_tokens: Count = 14
    k: Width = 3
    gallery: list[str] = sized(["positional_registry", "split_k"], [])


class LosslessParams(NotebookParams):
    """Notebook 08: is what speculation writes what the target would have written?

    `texts` are greedy texts of other engines: a JSONL file, or those shipped, which are left out where `target` did not
    write them. `other` is the target as the engine of a file computes it.
    """

    target: str = "smollm2-135m:f32"
    draft: str = "smollm2-135m:q4_0"
    k: Width = 4
    temperature: float = Field(default=0.7, gt=0, le=100)
    prompts: Count | str = sized(3, 12, 24)
    max_new_tokens: Count = sized(24, 64)
    texts: str = "shipped"
    other: str = ""


class ExplorerParams(NotebookParams):
    """Notebook 09: what would another K, drafter, temperature, content or machine give?

    Each prompt is generated once at every temperature, and with `top_p` at the highest; every drafter is followed
    along it. `trace` is `auto` (the shipped one, where nothing but the quick defaults is asked; else a new one),
    `new`, or the trace of StartParams, which brings its own.

    >>> ExplorerParams.checked(temperatures=[0.0, 0.5]).samplings
    ((0.0, 1.0), (0.5, 1.0), (0.5, 0.9))
    """

    trace: str = "auto"
    target: str = "smollm2-135m"
    drafters: Some[str] = ["lookup", "self"]
    prompts: str = ""
    contents: Categories = ["code", "edit", "prose"]
    temperatures: Some[Temperature] = sized([0.0, 0.7], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    top_p: float = Field(default=0.9, gt=0, le=1)
    prompts_per_category: Count = sized(3, 5, 12)
    max_new_tokens: Tokens = sized(32, 48)
    k_max: DraftLength = 24

    @property
    def samplings(self) -> tuple[tuple[float, float], ...]:
        """Temperature and top_p of every setting to record; greedy choice knows no top_p."""
        hottest = max(self.temperatures)
        extra = ((hottest, self.top_p),) if hottest and self.top_p < 1 else ()
        return (*((temperature, 1.0) for temperature in self.temperatures), *extra)
