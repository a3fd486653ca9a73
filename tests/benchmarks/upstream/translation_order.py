"""transformers 5.23, UniversalSpeculativeDecodingGenerator: sampled drafts are reported with another token's chance.

The pruned head lists the shared tokens in the order of `get_vocab()`, a hash map; `get_target_logits` hands them out in
the order of ids. So `q` is a permutation of what was drawn from, and the output no longer follows the target.
"""

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator


def tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=tokens[0])))


words = [f"w{i}" for i in range(40)]
target_tokens, draft_tokens = tokenizer(words), tokenizer(["only here", *words])  # the assistant has one token more
small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
assistant = LlamaForCausalLM(LlamaConfig(vocab_size=41, **small)).eval()
fed = torch.tensor([[5, 6, 7]])
sound = assistant(fed).logits[0, -1, 1:].softmax(-1)  # over the shared tokens, in the target's order
translator = AssistantToTargetTranslator(target_tokens, draft_tokens, 40, assistant, assistant_prune_lm_head=True)
translator.unmap_input_ids()
q = translator.get_target_logits(assistant(fed).logits)[0, -1].softmax(-1)
print(f"tokens that have their own chance: {int((q - sound).abs().lt(1e-7).sum())} of 40")
print(f"the same chances, in another order: {torch.allclose(q.sort().values, sound.sort().values, atol=1e-6)}")
