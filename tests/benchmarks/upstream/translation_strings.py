"""transformers 5.23, AssistantToTargetTranslator: tokens are matched as strings; line breaks and indents are lost.

A byte-level vocabulary writes a line break as "Ċ", a SentencePiece one as "<0x0A>" or as itself; of a run of spaces
only the first is translated. A draft model of the other family can then draft no line of code to its end.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

TEXTS = ["\n", "\t", "  ", "    ", " the", "the"]


def byte_level() -> PreTrainedTokenizerFast:
    tokens = ["Ċ", "ĉ", "Ġ", "ĠĠ", "ĠĠĠĠ", "Ġthe", "the"]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="the"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def sentence_piece() -> PreTrainedTokenizerFast:
    tokens = ["<0x0A>", "<0x09>", "▁", "▁▁", "▁▁▁▁", "▁the", "the"]
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="the"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


target, assistant = byte_level(), sentence_piece()
translator = AssistantToTargetTranslator(target, assistant, len(target.get_vocab()))
shared = {target.decode([i]) for i in translator.target_to_assistant_input_ids}
print({text: text in shared for text in TEXTS})  # each is one token of both vocabularies
