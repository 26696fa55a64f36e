"""From the requests of an episode to the sequences that are trained. Torch-free, pure.

A request is merged into the sequence of an earlier one only if that sequence (prompt and answer) is a prefix of the
request's prompt. The tokens in between come from the environment: mask False, behavior_logp 0, version and turn of the
sampled token before them. Otherwise the request starts a new sequence. So each sampled token is trained exactly once,
with exactly the context that it was sampled in, and nothing is tokenised again.

Sequences of one episode share its advantage and count as one trajectory i with |y_i| = Σ_j |y_ij| trained tokens:

    sequence_mean   trajectory's share of the loss   Σ_j (|y_ij| / |y_i|) x_ij      x_ij: token mean of sequence j
    all others      as if sequences were one         Σ_j Σ_t x_ijt

and one trajectory in the denominator. With all ratios 1 this equals the gradient of the trajectory as one sequence: the
first update does not depend on which requests were merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.types import Outcome, Sample, SampleId


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One request of an episode and its answer; `sample.id.turn` is its number.

    >>> Exchange((1, 2), Sample.of(SampleId(0, 0), [3], [-0.1], version=0)).tokens
    (1, 2, 3)
    """

    prompt: tuple[int, ...]
    sample: Sample

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.sample.tokens.tolist())


def assemble(exchanges: Sequence[Exchange]) -> tuple[Sample, ...]:
    """The sequences of an episode, each with its prompt, in the order of their first requests.

    >>> first = Exchange((1, 2), Sample.of(SampleId(0, 0), [3], [-0.1], version=0))
    >>> second = Exchange((1, 2, 3, 9), Sample.of(SampleId(0, 0, turn=1), [4], [-0.2], version=0))
    >>> [(s.prompt, s.tokens.tolist(), s.mask.tolist()) for s in assemble([first, second])]
    [((1, 2), [3, 9, 4], [True, False, True])]
    """
    chains: list[list[Exchange]] = []
    for exchange in exchanges:
        # Several sequences may match (an agent's parallel conversations): the longest one is continued.
        found = [chain for chain in chains if is_prefix(chain[-1].tokens, exchange.prompt)]
        if found:
            max(found, key=lambda chain: len(chain[-1].tokens)).append(exchange)
        else:
            chains.append([exchange])
    return tuple(_joined(chain) for chain in chains)


def episode_sample(
    id: SampleId,
    exchanges: Sequence[Exchange],
    *,
    prompt: tuple[int, ...],
    outcome: Outcome | None = None,
    turn_rewards: Mapping[int, float] | None = None,
) -> Sample:
    """The whole episode as one sample of its group; `prompt` is the group's prompt.

    An episode without requests is a sample without tokens.
    """
    # The first sequence is the sample itself; further ones are its `rest`.
    first, *rest = assemble(exchanges) or (Sample.of(id, [], [], version=0),)
    # A prompt equal to the group's is not stored twice.
    own = None if first.prompt in (None, tuple(prompt)) else first.prompt
    return replace(first, id=id, prompt=own, rest=tuple(rest), outcome=outcome, turn_rewards=dict(turn_rewards or {}))


def is_prefix(tokens: tuple[int, ...], of: tuple[int, ...]) -> bool:
    return len(tokens) <= len(of) and of[: len(tokens)] == tokens


def _joined(chain: Sequence[Exchange]) -> Sample:
    """Requests that continue each other, as one sequence after the prompt of the first."""
    first = chain[0]
    if len(chain) == 1:
        return replace(first.sample, prompt=first.prompt)
    parts: list[Sample] = []
    end = len(first.prompt)
    for number, exchange in enumerate(chain):
        # What the prompt has after the previous answer was added by the environment.
        sample, between = exchange.sample, exchange.prompt[end:]
        # Environment tokens belong to the sample before them; the first request has no such tokens.
        before = chain[max(number - 1, 0)].sample
        # After a sample without tokens (an aborted one) the version is that of the tokens that follow.
        version = before.versions[-1:] if number and len(before.versions) else sample.versions[:1]
        added = _environment_tokens(before.id, between, int(version[0]) if len(version) else 0)
        parts += [
            replace(added, extras=sample.extras.of_prompt(end)),
            replace(sample, turns=np.full(len(sample.tokens), sample.id.turn, dtype=np.int16)),
        ]
        end = len(exchange.prompt) + len(sample.tokens)  # length of the sequence so far, the first prompt included
    return replace(Sample.concatenate(parts), id=first.sample.id, prompt=first.prompt)


def _environment_tokens(id: SampleId, tokens: Sequence[int], version: int) -> Sample:
    """Tokens that the environment added after sample `id`: in the sequence, never trained."""
    num = len(tokens)
    return Sample.of(id, tokens, np.zeros(num), version, mask=np.zeros(num))
