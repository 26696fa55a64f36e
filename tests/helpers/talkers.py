"""A character tokenizer with a ChatML template, and a small model over it: episodes with nothing downloaded."""

import torch
import transformers as tf
from tokenizers import decoders
from word_tokenizers import tokenizer_of

from gspo.envs import Chat
from gspo.sampling import LocalSampler
from gspo.types import Prompt, Request, SampleId, SamplingParams

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | length }} tools<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 512
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n", "é"]


def tokenizer(template=CHATML):
    words = ["<pad>", START, END, *CHARACTERS]
    return tokenizer_of(
        words, change=lambda inner: setattr(inner, "decoder", decoders.Fuse()), pad_token="<pad>", eos_token=END,
        additional_special_tokens=[START, END], clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip


def chat(template=CHATML):
    return Chat(tokenizer(template))


def model(context=CONTEXT):
    config = tf.Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=context, tie_word_embeddings=True,
        initializer_range=0.4, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def sampler(context=CONTEXT, **how):
    # Several tokens end an answer, so that lengths differ.
    return LocalSampler(model(context), seed=1, eos_token_ids=[2, 3, 4, 5, 6], decode=tokenizer().decode, **how)


def arrays(sample):
    """All that is trained on, to compare samples by."""
    return [
        (s.prompt, s.tokens.tolist(), s.behavior_logp.tolist(), s.mask.tolist(), s.turns.tolist())
        for s in sample.sequences
    ]


def requests(talk, num=4, num_samples=2, first=0, **params):
    how = SamplingParams(max_new_tokens=12, **params)
    for submission in range(first, first + num):
        messages = ({"role": "user", "content": f"q{submission}?"},)
        tokens = talk.render(messages)
        prompt = Prompt(tokens, talk.tokenizer.decode(tokens), {"answer": str(submission)}, messages=messages)
        for i in range(num_samples):
            yield Request(SampleId(submission, i), tokens, how, origin=prompt)
