"""The held-out passages beside the embedded pair: text of the kind it was trained on, which training never saw."""

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specnb.errors import InputError
from specnb.lm.bounded_json import read_text
from specnb.paths import project_dir
from specnb.prompts import Prompt

MAX_BYTES = 4 << 20
MAX_PASSAGES = 10_000
KINDS = ("code", "prose")


class Passage(BaseModel):
    """A line of `data/models/held_out.jsonl`: `name` is the file it is from, `licence` that of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=500)
    kind: str
    licence: str
    text: str = Field(min_length=1, max_length=64 << 10)


def passages(kind: str = "code", *, limit: int) -> list[Prompt]:
    """The first `limit` passages of a `kind`, code or prose, as prompts that are continued as they stand.

    Raises InputError for another kind, a limit below 1, too few passages, or a file that is not as it should be.
    """
    if kind not in KINDS or limit < 1:
        raise InputError(f"passages are of the kind {' or '.join(KINDS)}, 1 or more of them; got {kind!r}, {limit}")
    path = project_dir() / "data" / "models" / "held_out.jsonl"
    lines = read_text(path, MAX_BYTES).splitlines()[:MAX_PASSAGES]
    try:
        found = [Passage.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise InputError(f"{path} holds a line that is no passage: {error}; restore it from the checkout") from error
    chosen = [passage for passage in found if passage.kind == kind][:limit]
    if len(chosen) < limit:
        raise InputError(f"{limit} passages of {kind} were asked for, {path.name} holds {len(chosen)}")
    return [Prompt(id=f"held-out-{kind}-{i:02d}", category=kind, text=one.text) for i, one in enumerate(chosen)]
