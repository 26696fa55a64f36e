"""Training on episodes: several turns in a sequence, several sequences in a trajectory."""

from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, padded
from made_steps import descend, make_plan, run, weights

from gspo import objectives
from gspo.envs import Exchange, episode_sample
from gspo.learner.credit import Shaping, is_flat
from gspo.learner.policy.module import PolicyModule, packed_parts
from gspo.learner.policy.packing import Completion, PackItem, families, micro_batches, pack, split_over_ranks
from gspo.monitor import sample_rows, step_metrics
from gspo.rollout import pack_groups, unpack_groups
from gspo.types import Failure, Group, Prompt, Sample, SampleId, Score

PROMPT = (5, 6, 7)


def exchanges(draw, shape, submission=0, number=0):
    """`shape`: for each turn (goes on from which turn, or None from the prompt; environment tokens; answer tokens)."""
    made = []
    for turn, (origin, words, length) in enumerate(shape):
        before = PROMPT if origin is None else made[origin].tokens
        prompt = (*before, *draw.integers(0, model_zoo.VOCAB, words).tolist())
        tokens = draw.integers(0, model_zoo.VOCAB, length)
        sample = Sample.of(SampleId(submission, number, turn), tokens, -draw.random(length) - 0.5, version=0)
        made.append(Exchange(prompt, sample))
    return made


# One completion; two turns; two turns and a branch off the first; three that share nothing but the prompt.
SHAPES = (
    [(None, 0, 6)],
    [(None, 0, 4), (0, 2, 3)],
    [(None, 0, 5), (0, 3, 2), (0, 2, 4)],
    [(None, 0, 3), (None, 2, 2), (None, 4, 5)],
)


def episode_groups(rewards=((1.0, 0.0, 0.5, 0.2), (0.0, 1.0, 0.0, 1.0)), turn_rewards=None, seed=3, apart=False):
    """Groups of the four shapes; `apart`: every request a sequence of its own."""
    draw = np.random.default_rng(seed)
    groups = []
    for submission, values in enumerate(rewards):
        samples = []
        for number, shape in enumerate(SHAPES):
            made = exchanges(draw, shape, submission, number)
            given = (turn_rewards or {}).get(number, {})
            sample = episode_sample(
                SampleId(submission, number), made, prompt=PROMPT, outcome=Score(values[number]), turn_rewards=given
            )
            if apart:
                parts = [replace(e.sample, prompt=e.prompt) for e in made]
                sample = replace(sample, **{
                    name: getattr(parts[0], name) for name in ("tokens", "behavior_logp", "versions", "mask", "turns")
                }, rest=tuple(parts[1:]))  # fmt: skip
            samples.append(sample)
        outcomes = tuple(s.outcome for s in samples)
        groups.append(Group(submission, Prompt(PROMPT, "?"), tuple(samples), ("",) * len(samples), outcomes))
    return groups


def plain_logp(model, batch, temperature):
    """Log-probs [B, T] and mask of every sequence after its own prompt, on padded rows."""
    alone = [replace(batch.groups[0], prompt=Prompt(batch.prompt(i), ""), samples=(replace(s, rest=(), prompt=None),))
             for i, s in enumerate(batch.samples)]  # fmt: skip
    alone = [replace(group, outcomes=(Score(0.0),), texts=("",)) for group in alone]
    ids, attention, source, mask = padded(make_batch(alone), np.ones(batch.num_sequences, bool))
    logp = (model(input_ids=ids, attention_mask=attention, use_cache=False).logits / temperature).log_softmax(-1)
    at = logp.gather(1, source[..., None].expand(-1, -1, logp.shape[-1]))
    return at.gather(2, ids.gather(1, source + 1)[..., None])[..., 0], mask


def plain_update(model, batch, plan, num_trajectories):
    """One update the plain way: padded rows, each sequence weighted by its share of its trajectory."""
    logp, mask = plain_logp(model, batch, plan.temperature)
    lengths = mask.sum(-1)
    total = torch.zeros(len(batch.is_first), dtype=torch.float64).index_add(
        0, torch.from_numpy(batch.trajectory_of), lengths.double()
    )
    share = lengths / total[torch.from_numpy(batch.trajectory_of)]
    out = objectives.loss(
        plan.name, logp, logp.detach(), torch.from_numpy(batch.advantages), mask,
        weight=share if plan.settings["aggregation"] == "sequence_mean" else None,
        denominator=objectives.denominator(
            plan.name, num_sequences=num_trajectories, num_tokens=int(lengths.sum()), max_new_tokens=11
        ), **plan.settings,
    )  # fmt: skip
    model.zero_grad()
    out.loss.backward()
    descend(model)
    return weights(model)


def close(a, b, tolerance=1e-10):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "luspo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("max_tokens", [8192, 24])
def test_the_update_is_that_of_plain_rows_weighted_by_their_share_of_the_trajectory(name, max_tokens, exact):
    batch = make_batch(episode_groups())
    assert batch.num_sequences == 2 * (1 + 1 + 2 + 3)
    model = model_zoo.build("qwen3")
    run(model, batch, make_plan(name, max_tokens=max_tokens))
    close(weights(model), plain_update(model_zoo.build("qwen3"), batch, make_plan(name), 8))


def test_where_requests_happen_to_merge_does_not_change_the_first_update(exact):
    merged, apart = make_batch(episode_groups()), make_batch(episode_groups(apart=True))
    assert (merged.num_sequences, apart.num_sequences) == (14, 18)
    one, other = model_zoo.build("qwen3"), model_zoo.build("qwen3")
    run(one, merged, make_plan())
    run(other, apart, make_plan())
    close(weights(one), weights(other))


def test_sequences_of_a_trajectory_share_what_they_begin_with(exact):
    batch = make_batch(episode_groups(apart=True))
    everything = np.ones(batch.num_sequences, bool)
    policy = PolicyModule(model_zoo.build("qwen3"))
    (shared,) = packed_parts(policy, batch.items(everything), 8192)
    # By hand, for each group: the prompt once; 5; 3 + 1 + 2 + 2 (the last of an answer enters where it is gone on
    # from); 4 + 1 + 3 + 1 + 2 + 3; 2 + 2 + 1 + 4 + 4.
    assert shared.num_tokens == 2 * (3 + 5 + 8 + 14 + 13)
    assert shared.num_tokens == sum(item.num_tokens(share_prefix=True) for item in batch.items(everything))
    logp, mask = plain_logp(policy.model, batch, 1.0)
    with torch.no_grad():
        out = policy(shared, temperature=1.0).logp
    for b, i in enumerate(shared.index.tolist()):
        mine = out[shared.cu_seqlens[b] : shared.cu_seqlens[b + 1]]
        torch.testing.assert_close(mine, logp[i][mask[i]], rtol=1e-10, atol=1e-10)


def test_a_tree_of_relatives_is_packed_once_and_cut_only_where_it_must_be():
    family = [Completion(np.array(tokens), np.array([False] * 3 + [True]), i, family=7)
              for i, tokens in enumerate(([1, 2, 3, 9], [1, 2, 4, 9], [1, 2, 3, 8], [5, 2, 3, 9]))]  # fmt: skip
    alone = [Completion(np.array([1, 2, 3, 9]), np.ones(4, bool), i) for i in (4, 5)]
    item = PackItem(np.array([7, 8]), (*family, *alone))
    assert [len(f) for f in families(item.completions)] == [4, 1, 1]
    packed = pack([item])
    assert packed.num_tokens == item.num_tokens(share_prefix=True) == 2 + (2 + 1 + 1 + 3) + 3 + 3
    assert packed.index.tolist() == [0, 1, 2, 3, 4, 5]
    # The first three and the last token's sources: 1 2 3, 1 2 4, 1 2 3 again, 5 2 3.
    assert packed.tokens[packed.source[:4]].tolist() == [3, 4, 3, 3]
    assert packed.source[0] == packed.source[2]
    whole, small = micro_batches([item], 11), micro_batches([item], 6)
    assert [sorted(c.index for i in part for c in i.completions) for part in whole] == [[0, 1, 2, 3], [4, 5]]
    assert sorted(c.index for part in small for i in part for c in i.completions) == [0, 1, 2, 3, 4, 5]
    assert all(sum(i.num_tokens(share_prefix=True) for i in part) <= 6 for part in small)
    halves = split_over_ranks([item], 2)
    assert sorted(c.index for part in halves for i in part for c in i.completions) == [0, 1, 2, 3, 4, 5]
    assert item.num_tokens(share_prefix=False) == pack([item], share_prefix=False).num_tokens == 6 * 5


def test_a_trajectory_counts_once_and_is_never_divided():
    groups = episode_groups()
    batch = make_batch(groups, num_minibatches=4)
    assert batch.is_first.sum() == 8
    assert batch.trajectory_of.tolist() == [0, 1, 2, 2, 3, 3, 3, 4, 5, 6, 6, 7, 7, 7]
    assert batch.minibatch.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    np.testing.assert_allclose(np.bincount(batch.trajectory_of, batch.token_share), 1)
    assert batch.token_share[[2, 3]].tolist() == [7 / 11, 4 / 11]
    plain = make_batch([replace(g, samples=tuple(replace(s, rest=()) for s in g.samples)) for g in groups])
    np.testing.assert_array_equal(batch.advantages[batch.is_first], plain.advantages)
    np.testing.assert_array_equal(batch.advantages, plain.advantages[batch.trajectory_of])
    report = run(model_zoo.build("qwen3", torch.float32), batch, make_plan(num_minibatches=4))
    metrics = step_metrics(batch, report, 0)
    assert metrics["reward/mean"] == pytest.approx(3.7 / 8)
    assert metrics["episode/sequences_mean"] == 14 / 8
    assert metrics["episode/turns_max"] == 3


@pytest.mark.parametrize("proximal", ["recompute", "rollout"])
def test_what_an_environment_said_is_in_no_ratio_and_no_loss(proximal):
    """Garbage as its log-probs and versions changes nothing, bit for bit; its tokens condition, and nothing else."""

    def spoilt(sample):
        logp, versions = sample.behavior_logp.copy(), sample.versions.copy()
        logp[~sample.mask], versions[~sample.mask] = np.nan, -7
        return replace(sample, behavior_logp=logp, versions=versions, rest=tuple(map(spoilt, sample.rest)))

    groups = episode_groups()
    dirty = [replace(g, samples=tuple(map(spoilt, g.samples))) for g in groups]
    assert any(np.isnan(s.behavior_logp).any() for g in dirty for s in g.samples)
    outs = []
    for unit in ("trajectory", "turn"):
        for some in (groups, dirty):
            model, batch = model_zoo.build("qwen3", torch.float32), make_batch(some, num_minibatches=2)
            report = run(model, batch, make_plan(num_minibatches=2, sequence_unit=unit), proximal=proximal, lr=0.05)
            assert batch.trained_tokens.tolist() == [int(s.mask.sum()) for s in batch.samples]
            outs.append((weights(model), report.log_s, report.losses))
    for (clean, log_s, losses), (garbage, log_s_too, losses_too) in (outs[:2], outs[2:]):
        assert all(torch.equal(clean[name], garbage[name]) for name in clean)
        np.testing.assert_array_equal(log_s, log_s_too)
        assert losses == losses_too


def test_a_turn_as_unit_is_the_trajectory_where_episodes_have_one_turn():
    draw = np.random.default_rng(5)
    samples = tuple(
        episode_sample(SampleId(0, i), exchanges(draw, [(None, 0, 3 + i)], 0, i), prompt=PROMPT, outcome=Score(i % 2))
        for i in range(4)
    )
    group = Group(0, Prompt(PROMPT, "?"), samples, ("",) * 4, tuple(s.outcome for s in samples))
    batch, results = make_batch([group], num_minibatches=2), []
    for unit in ("trajectory", "turn"):
        model = model_zoo.build("qwen3", torch.float32)
        report = run(model, batch, make_plan(num_minibatches=2, sequence_unit=unit), lr=0.05)
        results.append((weights(model), report.log_s))
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_turns_have_their_own_clip_and_the_report_is_of_sequences(exact):
    batch = make_batch(episode_groups(), num_minibatches=2)
    reports = {}
    for unit in ("trajectory", "turn"):
        model = model_zoo.build("qwen3")
        plan = make_plan(num_minibatches=2, sequence_unit=unit, settings={"clip_low": 1e-4, "clip_high": 1e-4})
        reports[unit] = run(model, batch, plan, lr=0.05), weights(model)
    whole, turned = reports["trajectory"][0], reports["turn"][0]
    np.testing.assert_allclose(whole.log_s, turned.log_s, rtol=1e-9, atol=1e-12)  # a weighted mean is the mean
    later = batch.minibatch == 1
    clipped = (turned.clipped_low + turned.clipped_high)[later]
    assert ((clipped > 0) & (clipped < batch.trained_tokens[later])).any()  # one turn of a sequence, and not another
    assert any(not torch.equal(reports["trajectory"][1][name], reports["turn"][1][name]) for name in reports["turn"][1])


def test_rewards_of_turns_reach_their_own_tokens():
    groups = episode_groups(turn_rewards={1: {0: 0.25}})
    batch = make_batch(groups)
    assert batch.token_advantages is not None
    first, second = np.split(batch.token_advantages[1], [4])
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] > second[0]  # the turn that earned has more than the one after it
    assert batch.advantages[1] == pytest.approx(batch.token_advantages[1].mean())
    undiscounted = make_batch(episode_groups())
    assert undiscounted.token_advantages is None
    late = make_batch(episode_groups(), turn_discount=0.5).token_advantages
    assert late[1][0] == pytest.approx(undiscounted.advantages[1] / 2)
    assert late[1][-1] == pytest.approx(undiscounted.advantages[1])


def test_with_the_samplers_log_probs_a_ratio_is_of_each_tokens_own_policy_and_versions_only_weigh():
    """Partial rollouts: tokens of two versions. Their numbers change nothing but the interpolation by version."""
    groups = episode_groups()

    def aged(sample):
        versions = np.where(sample.turns > 0, 3, 2).astype(np.int32)
        return replace(sample, versions=versions, rest=tuple(map(aged, sample.rest)))

    mixed = [replace(g, samples=tuple(map(aged, g.samples))) for g in groups]
    for proximal, same in (("recompute", True), ("rollout", True), ("loglinear", False)):
        made = []
        for some in (groups, mixed):
            model = model_zoo.build("qwen3", torch.float32)
            report = run(model, make_batch(some, num_minibatches=2), make_plan(num_minibatches=2), proximal=proximal,
                         lr=0.05, version=3)  # fmt: skip
            made.append((weights(model), report))
        equal = all(torch.equal(made[0][0][name], made[1][0][name]) for name in made[0][0])
        assert equal == same
        if proximal == "rollout":  # π_old is what was recorded, so log s of mini-batch 1 is already the drift
            batch, report = make_batch(mixed, num_minibatches=2), made[1][1]
            with torch.no_grad():
                logp, mask = plain_logp(model_zoo.build("qwen3", torch.float32), batch, 0.8)
            for i in np.flatnonzero(batch.minibatch == 0):
                own = batch.samples[i].behavior_logp[batch.samples[i].mask]
                expected = (logp[i][mask[i]].numpy() - own).mean()
                assert report.log_s[i] == pytest.approx(expected, abs=1e-4)


def test_the_longest_turn_is_what_an_overlong_penalty_counts():
    shaping = Shaping(overlong_tokens=4, max_new_tokens=8)
    batch = make_batch(episode_groups(), shaping=shaping)
    # Longest turns: 6, 4, 5, 5 of at most 8, penalised from 4 on.
    np.testing.assert_allclose(batch.shaped[batch.is_first][:4], np.array([1, 0, 0.5, 0.2]) - [0.5, 0, 0.25, 0.25])
    assert not is_flat(batch.groups[0], shaping)


def test_an_episode_that_failed_is_out_of_every_count():
    groups = episode_groups()
    failed = replace(groups[0].samples[2], outcome=Failure("timeout", "environment: silent"))
    group = replace(
        groups[0],
        samples=(*groups[0].samples[:2], failed, groups[0].samples[3]),
        outcomes=tuple(Failure("timeout", "x") if i == 2 else o for i, o in enumerate(groups[0].outcomes)),
    )
    batch = make_batch([group, groups[1]])
    assert (~batch.in_denominator).tolist() == [False, False, True, True, *[False] * 10]
    report = run(model_zoo.build("qwen3", torch.float32), batch, make_plan())
    metrics = step_metrics(batch, report, 0)
    assert metrics["reward/failures"] == 1
    assert metrics["episode/failures_timeout"] == 1


def test_groups_of_episodes_wait_in_a_checkpoint_and_come_back_bit_for_bit():
    groups = episode_groups(turn_rewards={1: {0: 0.25}})
    plain = make_batch([replace(g, samples=(replace(g.samples[0], outcome=None),) * 2, texts=("", ""),
                                outcomes=g.outcomes[:2]) for g in groups]).groups  # fmt: skip
    for some in (groups, plain):
        arrays, rows = pack_groups(some)
        back = unpack_groups(arrays, rows, lambda submission: Prompt(PROMPT, "?"))
        for group, again in zip(some, back, strict=True):
            for sample, copy in zip(group.samples, again.samples, strict=True):
                assert (sample.outcome, dict(sample.turn_rewards)) == (copy.outcome, dict(copy.turn_rewards))
                assert len(sample.sequences) == len(copy.sequences)
                for a, b in zip(sample.sequences, copy.sequences, strict=True):
                    assert (a.id, a.prompt, a.finish) == (b.id, b.prompt, b.finish)
                    for name in ("tokens", "behavior_logp", "versions", "mask", "turns"):
                        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_rows_of_episodes_say_who_spoke():
    batch = make_batch(episode_groups(turn_rewards={1: {0: 0.25}}))
    report = run(model_zoo.build("qwen3", torch.float32), batch, make_plan())
    rows = sample_rows(batch, report, 1, lambda tokens: " ".join(map(str, tokens)))
    assert [(row["sample"], row["branch"]) for row in rows[:7]] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    spoken = [(span["turn"], span["by"], span["length"]) for span in rows[1]["turns"]]
    assert spoken == [(0, "model", 4), (0, "environment", 2), (1, "model", 3)]
    assert rows[1]["turns"][0]["reward"] == 0.25
    assert rows[1]["turns"][0]["advantage"] > rows[1]["turns"][2]["advantage"]
    assert " ".join(span["text"] for span in rows[1]["turns"]) == rows[1]["completion"]
    assert rows[3]["prompt"] != rows[2]["prompt"]
