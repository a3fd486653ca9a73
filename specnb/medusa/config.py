"""What a set of heads is: everything besides the weights that a loader must know to use them rightly."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1
MAX_HEADS = 16


class HeadsConfig(BaseModel):
    """The `config.json` beside the weights.

    `input` is the norm contract: `pre_norm` heads are fed the hidden state in front of the backbone's final norm and
    apply a frozen copy of it once; `post_norm` heads are fed what comes out of that norm (transformers'
    `hidden_states[-1]` in the Llama family) and apply none. `lm_head` is the backbone's own (`shared`), that and a
    trained product of rank `rank` (`low_rank`), or one of their own for each head (`private`). With `draft_vocab`
    above 0 heads choose among that many tokens only, and a map says which. `backbone` is `Backbone.digest`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = FORMAT_VERSION
    kind: Literal["medusa", "hydra"] = "medusa"
    n_heads: int = Field(ge=1, le=MAX_HEADS)
    n_layers: int = Field(default=1, ge=1, le=8)
    hidden_size: int = Field(ge=1, le=1 << 16)
    vocab_size: int = Field(ge=2, le=1 << 20)
    input: Literal["pre_norm", "post_norm"] = "pre_norm"
    bias: bool = True
    lm_head: Literal["shared", "private", "low_rank"] = "shared"
    rank: int = Field(default=0, ge=0, le=4096)
    draft_vocab: int = Field(default=0, ge=0)
    backbone: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    backbone_name: str = Field(default="", max_length=300)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.lm_head == "low_rank") != (self.rank > 0):
            raise ValueError(
                f"rank is {self.rank}, but lm_head is {self.lm_head}: low_rank has a rank, others have none"
            )
        if self.draft_vocab > self.vocab_size:
            raise ValueError(f"draft_vocab {self.draft_vocab} is larger than the vocabulary of {self.vocab_size}")
        return self

    @property
    def draft_size(self) -> int:
        """Tokens that the heads choose among."""
        return self.draft_vocab or self.vocab_size

    def conditions(self, head: int) -> int:
        """Token embeddings that `head` sees: Hydra's head i those of the i + 1 tokens before the one it drafts."""
        return head + 1 if self.kind == "hydra" else 0
