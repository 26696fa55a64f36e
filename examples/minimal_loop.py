"""GSPO without the framework around it: one file to read from top to bottom.

    .venv/bin/python examples/minimal_loop.py            # a tiny model learns to add; about two minutes on a CPU

    prompts → samples → rewards → advantages → two updates → new weights → the next prompts

It uses four pieces of the package: a data set, the in-process sampler, the objective and the advantage. Everything that
`gspo.train.Trainer` adds (packing with shared prompts, skipped work, checkpoints, servers, ranks, evaluation, reports)
changes speed and comfort, not the result: tests/train/test_minimal_loop.py trains both and compares losses and weights.

Shapes: P prompts in a batch, G completions of each prompt, B = P·G sequences (B/2 in a mini-batch), T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo import objectives
from gspo.data import load_dataset
from gspo.models import load_model, load_tokenizer
from gspo.objectives import advantage
from gspo.sampling import LocalSampler
from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams

SEED = 1
NUM_STEPS = 40
NUM_PROMPTS = 16  # P, prompts in a batch
GROUP_SIZE = 8  # G, completions of each prompt
NUM_MINIBATCHES = 2  # optimizer updates on each batch
MAX_NEW_TOKENS = 48
LEARNING_RATE = 2e-4
MAX_GRAD_NORM = 1.0
# The paper's ε of 3e-4 and 4e-4 is for completions of thousands of tokens; short ones move further per token.
CLIP_LOW, CLIP_HIGH = 0.002, 0.0025


def reward(completion: str, answer: str) -> float:
    """1 if the text after the last '>' is the sum, else 0."""
    _, mark, result = completion.rpartition(">")
    return float(bool(mark) and result.strip() == answer)


def sample_completions(sampler: LocalSampler, prompts: list[Prompt], first: int) -> list[Sample]:
    """G completions of each prompt, ordered by prompt. `first` is the number of the batch's first prompt in the run.

    (prompt number, completion number) is the key of the random draws: the same seed gives the same tokens.
    """
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    sampler.submit(
        [
            Request(SampleId(first + p, g), prompt.tokens, params)
            for p, prompt in enumerate(prompts)
            for g in range(GROUP_SIZE)
        ]
    )
    return sorted(sampler.completed(), key=lambda sample: sample.id)


def token_logp(model, prompts: list[tuple[int, ...]], completions: list[list[int]]) -> tuple[Tensor, Tensor]:
    """log π(y_t | x, y_<t) of every completion token and the mask of real tokens, both [B, T]; T: longest completion.

    Sequences are padded on the right: a causal model never looks ahead, so padding cannot reach a real token.
    """
    longest = max(map(len, completions))  # T
    rows = [[*x, *y] for x, y in zip(prompts, completions, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # [B, longest row]
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    logits = model(input_ids=tokens, use_cache=False).logits  # [B, longest row, vocabulary]
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)  # [B, longest row − 1]
    # The logits at position t predict token t + 1: a completion's first token is predicted by the prompt's last one.
    out, mask = logp.new_zeros(len(rows), longest), torch.zeros(len(rows), longest)
    for i, (x, y) in enumerate(zip(prompts, completions, strict=True)):
        out[i, : len(y)] = logp[i, len(x) - 1 : len(x) - 1 + len(y)]
        mask[i, : len(y)] = 1
    return out, mask


def train(
    model_path: str = "embedded:tiny",
    data_path: str = "embedded:arithmetic",
    num_steps: int = NUM_STEPS,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.nn.Module, list[float]]:
    """The trained model and the loss of every update."""
    tokenizer = load_tokenizer(model_path)
    model = load_model(model_path, dtype)
    problems = load_dataset(data_path, "train", tokenizer=tokenizer)
    # The sampler reads the weights of the very model that is trained: an update is visible to it at once.
    sampler = LocalSampler(model, seed=SEED, eos_token_ids=[tokenizer.eos_token_id])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses: list[float] = []

    for step in range(num_steps):
        # 1. Prompts, and G completions of each, by the current policy.
        first = step * NUM_PROMPTS
        prompts = [problems.prompt(problems.row_of(SEED, first + p)) for p in range(NUM_PROMPTS)]
        samples = sample_completions(sampler, prompts, first)
        contexts = [prompt.tokens for prompt in prompts for _ in range(GROUP_SIZE)]
        completions = [sample.tokens.tolist() for sample in samples]

        # 2. Rewards, and advantages within each group: A_i = (r_i − mean r) / std r, eq. 6 of the paper.
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
        answers = [str(prompt.data["answer"]) for prompt in prompts for _ in range(GROUP_SIZE)]
        rewards = torch.tensor([reward(*pair) for pair in zip(texts, answers, strict=True)])  # [B]
        groups = torch.arange(NUM_PROMPTS).repeat_interleave(GROUP_SIZE)  # [B]
        advantages = advantage.group_std(rewards, groups)  # [B]

        # 3. π_old: the policy at the start of the batch. It is computed once, before the first update changes the
        #    weights. (Taking each mini-batch's own detached log-probs instead would make every ratio 1.)
        with torch.no_grad():
            proximal, _ = token_logp(model, contexts, completions)  # [B, T]

        # 4. One update per mini-batch of whole groups. The loss is −mean_i min(s_i A_i, clip(s_i, 1 − ε, 1 + ε) A_i),
        #    eq. 5, with one ratio per completion, s_i = exp(mean_t (log π_θ − log π_old)), eq. 7.
        for k in range(NUM_MINIBATCHES):
            part = range(k * len(samples) // NUM_MINIBATCHES, (k + 1) * len(samples) // NUM_MINIBATCHES)
            logp, mask = token_logp(model, [contexts[i] for i in part], [completions[i] for i in part])
            old = proximal[part, : logp.shape[1]]  # cut to the longest completion of this mini-batch
            out = objectives.loss(
                "gspo",
                logp,
                old,
                advantages[part],
                mask,
                clip_low=CLIP_LOW,
                clip_high=CLIP_HIGH,
            )
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(out.loss.item())

        # 5. The weights are new: the sampler forgets the keys and values it computed with the old ones.
        sampler.load_weights(step + 1, None)
        clipped = out.clipped.float().mean().item()  # of the last mini-batch
        print(f"step {step + 1:2}  reward {rewards.mean().item():.3f}  clipped {clipped:.0%}  {texts[0]!r}", flush=True)
    return model, losses


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train()
