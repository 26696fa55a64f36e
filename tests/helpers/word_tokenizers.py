"""Tokenizers whose words are given: a token's id is its word's place in the list."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer_of(words, unknown=None, change=None, **settings):
    """Words of one character stand side by side, others between spaces. `change`: of the inner tokenizer."""
    words = list(words)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown or words[0]))
    between_spaces = sum(len(word) > 1 for word in words) > len(words) / 2
    inner.pre_tokenizer = pre_tokenizers.Whitespace() if between_spaces else pre_tokenizers.Split("", "isolated")
    if change is not None:
        change(inner)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **settings)
