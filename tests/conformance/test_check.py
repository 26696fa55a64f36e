"""Losses with one bug each: every bug of the list that shipped elsewhere is found by a vector."""

import pytest
import torch

from gspo.conformance import adapted, case_named, check_all, check_case, show
from gspo.errors import ConfigError


def token_logps(logits, tokens, temperature):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def group_advantages(rewards, groups):
    out = torch.zeros_like(rewards, dtype=torch.float64)
    for group in groups.unique():
        inside = rewards[groups == group].double()
        if float(inside.max() - inside.min()) > 1e-6:
            out[groups == group] = (inside - inside.mean()) / inside.std()
    return out


def sound(logp, proximal_logp, advantage, mask, clip_low, clip_high, cu_seqlens=None, num_sequences=None, bug=""):
    """GSPO that agrees in every case; `bug` breaks one line of it."""
    if bug == "old is detached new":
        proximal_logp = logp.detach()
    if cu_seqlens is not None:
        rows = cu_seqlens.diff().tolist() if bug != "packed as one" else [len(logp)]
        logp, proximal_logp, mask = (
            torch.nn.utils.rnn.pad_sequence(x.split(rows), batch_first=True) for x in (logp, proximal_logp, mask)
        )
        advantage = advantage[: len(rows)]
    num_tokens = mask.sum(-1).clamp(min=1)
    if bug == "holes count":
        num_tokens = (mask * torch.arange(1, mask.shape[1] + 1)).amax(-1).clamp(min=1)
    d = (logp.float() if logp.dtype != torch.float64 else logp) - proximal_logp
    d = d if bug == "padding leaks" else torch.where(mask, d, 0.0)
    log_s = d.sum(-1) / num_tokens
    if bug == "nan is hidden":
        log_s = log_s.nan_to_num(0.0)
    if bug == "clip_high is not read":
        clip_high = clip_low
    low, high = log_s.new_tensor(1 - clip_low).log(), log_s.new_tensor(1 + clip_high).log()
    if bug == "exp before the bound":
        s = log_s.exp()
        j = torch.min(s * advantage, s.clamp(1 - clip_low, 1 + clip_high) * advantage)
    else:
        below = torch.where(advantage < 0, low, -20.0)
        above = torch.where(advantage > 0, high, 20.0)
        j = torch.clamp(log_s, below, above).exp() * advantage
    if bug == "broadcast":
        j = log_s.clamp(-20, 20).exp()[:, None].expand_as(mask) * advantage / num_tokens[:, None]
        return -(j * mask).sum() / len(logp)
    clipped = ((log_s > high) & (advantage > 0)) | ((log_s < low) & (advantage < 0))
    per_sequence = torch.where(mask.any(-1), j, 0.0 * j)
    metrics = {"clip_fraction": clipped.float().mean()}
    if bug == "padding in the metric":
        metrics["clip_fraction"] = (clipped[:, None] * mask).float().mean()
    if bug == "token mean":
        return -(per_sequence * num_tokens).sum() / num_tokens.sum(), metrics
    count = len(logp) if bug == "own denominator" else num_sequences or len(logp)
    return -per_sequence.sum() / count, metrics


def broken(bug):
    def loss(logp, proximal_logp, advantage, mask, clip_low, clip_high, cu_seqlens=None, num_sequences=None):
        return sound(logp, proximal_logp, advantage, mask, clip_low, clip_high, cu_seqlens, num_sequences, bug)

    return loss


def caught(outcomes) -> set[str]:
    """Cases whose answer is not the paper's or, where it is open, not the one that `sound` gives."""
    tested = [o for o in outcomes if o.status != "not offered"]
    return {o.case.name for o in tested if o.is_wrong or (o.answer and o.answer != o.case.answers[0].name)}


def test_a_sound_loss_agrees_everywhere():
    outcomes = check_all(adapted(broken(""), advantage=group_advantages, logp=token_logps))
    assert caught(outcomes) == set()
    assert sum(o.status == "agrees" for o in outcomes) >= 18
    assert {o.metric for o in outcomes if o.case.decided and o.metric} == {"sequences"}


BUGS = {  # of ../shared/gspo.md, 5: what is broken → cases that must see it
    "broadcast": {"square", "clean"},  # 1
    "packed as one": {"packed"},  # 2
    "padding leaks": {"padding_garbage"},  # 3
    "token mean": {"clean", "ragged", "square"},  # 4
    "own denominator": {"split_even", "split_uneven"},  # 5
    "holes count": {"tool_masked"},  # 5, 15
    "exp before the bound": {"extreme_clipped", "extreme_zero"},  # 7
    "nan is hidden": {"trained_nan"},  # 7
    "old is detached new": {"clean", "epsilon_wide"},  # 10
    "clip_high is not read": {"epsilon_asymmetric", "epsilon_wide"},  # 13
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_shipped_bug_is_found(bug):
    assert BUGS[bug] <= caught(check_all(adapted(broken(bug))))


def test_6_the_order_of_a_sum_in_bfloat16_is_found():
    def token(logp, proximal_logp, advantage, mask, clip_low, clip_high, right=True):
        log_s = ((logp - proximal_logp).detach() * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        log_s = log_s.to(logp.dtype)
        log_s_t = (logp - logp.detach()) + log_s if right else (log_s + logp) - logp.detach()
        s = log_s_t.clamp(-20, 20).exp().float()
        j = torch.min(s * advantage, s.clamp(1 - clip_low, 1 + clip_high) * advantage)
        return -((j * mask).sum(-1) / mask.sum(-1)).mean()

    def wrong(logp, proximal_logp, advantage, mask, clip_low, clip_high):
        return token(logp, proximal_logp, advantage, mask, clip_low, clip_high, right=False)

    case = case_named("bfloat16_token")
    options = {"objective": "gspo_token", "advantage_per": "token"}
    assert check_case(adapted(token, **options), case).status == "agrees"
    assert check_case(adapted(wrong, **options), case).status == "differs"


def test_8_and_9_wrong_advantages_are_found():
    def with_epsilon(rewards, groups):
        out = torch.zeros_like(rewards)
        for group in groups.unique():
            inside = rewards[groups == group]
            out[groups == group] = (inside - inside.mean()) / (inside.std() + 1e-8)
        return out

    def over_the_batch(rewards, groups):
        return (rewards - rewards.mean()) / rewards.std()

    biased = check_case(adapted(sound_like, advantage=lambda r, g: unbiased_to_biased(r, g)), case_named(NAMES[0]))
    assert (biased.status, biased.answer) == ("open", "biased std")
    assert check_case(adapted(sound_like, advantage=over_the_batch), case_named(NAMES[0])).answer == "other"
    assert check_case(adapted(sound_like, advantage=with_epsilon), case_named(NAMES[1])).answer == "other"


NAMES = ("advantage_groups", "advantage_equal")
sound_like = broken("")


def unbiased_to_biased(rewards, groups):
    sizes = torch.tensor([int((groups == g).sum()) for g in groups], dtype=torch.float64)
    return group_advantages(rewards, groups) * (sizes / (sizes - 1)).sqrt()


def test_11_log_probs_without_the_temperature_are_found():
    def cold(logits, tokens, temperature):
        return token_logps(logits, tokens, 1.0)

    assert check_case(adapted(sound_like, logp=cold), case_named("temperature")).status == "differs"
    assert check_case(adapted(sound_like, logp=token_logps), case_named("temperature")).status == "agrees"


def test_12_a_clip_fraction_over_the_padding_is_shown_as_a_number():
    outcome = check_case(adapted(broken("padding in the metric")), case_named("clean"))
    assert outcome.status == "agrees"
    assert outcome.metric == f"{13 / 54:.3f}"  # 9 + 4 clipped tokens of 6 × 9 places


def test_14_staleness_without_a_weight_is_found():
    def ppo(logp, proximal_logp, behavior_logp, advantage, response_mask, clip_low, clip_high, weighted=True):
        w = (logp - proximal_logp).exp()
        j = torch.min(w * advantage, w.clamp(1 - clip_low, 1 + clip_high) * advantage)
        j = j * (proximal_logp - behavior_logp).exp() if weighted else j
        return -(j * response_mask).sum() / response_mask.sum()

    def unweighted(logp, proximal_logp, behavior_logp, advantage, response_mask, clip_low, clip_high):
        return ppo(logp, proximal_logp, behavior_logp, advantage, response_mask, clip_low, clip_high, False)

    case = case_named("decoupled_ppo")
    assert check_case(adapted(ppo, objective="decoupled_ppo"), case).status == "agrees"
    assert check_case(adapted(unweighted, objective="decoupled_ppo"), case).status == "differs"


def test_what_is_not_a_loss_is_named():
    def details(function):
        return check_case(adapted(function), case_named("clean")).details[0]

    def writes(logp, proximal_logp, advantage, mask):
        mask &= False
        return logp.sum()

    def shaped(logp, proximal_logp, advantage, mask):
        return logp

    def number(logp, proximal_logp, advantage, mask):
        return 0.5

    def detached(logp, proximal_logp, advantage, mask):
        return logp.detach().sum()

    def nan(logp, proximal_logp, advantage, mask):
        return logp.sum() * float("nan")

    def raises(logp, proximal_logp, advantage, mask):
        raise RuntimeError("no CUDA")

    assert "changes its input mask in place" in details(writes)
    assert "loss of shape [6, 9]; return the scalar" in details(shaped)
    assert "returned the loss as float" in details(number)
    assert "has no gradient" in details(detached)
    assert "the loss is NaN" in details(nan)
    assert details(raises).startswith("RuntimeError: no CUDA")


def test_parameters_of_an_unknown_meaning_are_named():
    with pytest.raises(ConfigError, match="parameter 'temperature_schedule' without a default"):
        adapted(lambda logp, proximal_logp, advantage, temperature_schedule: None)
    with pytest.raises(ConfigError, match=r"no parameter for proximal_logp \(old_log_prob"):
        adapted(lambda logp, advantage: None)


def test_signatures_of_trainers_are_recognised():
    def verl_like(old_log_prob, log_prob, advantages, response_mask, config=None, loss_agg_mode="mean"):
        assert advantages.shape == log_prob.shape
        loss = sound(
            log_prob, old_log_prob, advantages[:, 0], response_mask, config.clip_ratio_low, config.clip_ratio_high
        )
        return loss[0], {"actor/pg_clipfrac": float(loss[1]["clip_fraction"]), "actor/pg_clipfrac_lower": 0.0}

    def trl_like(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_low, epsilon_high):
        assert advantages.ndim == 1
        return sound(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_low, epsilon_high)

    for function in (verl_like, trl_like):
        outcome = check_case(adapted(function), case_named("clean"))
        assert (outcome.status, outcome.metric) == ("agrees", "sequences"), outcome.details


def test_differences_of_one_cause_are_one_entry_and_open_answers_say_what_ours_is():
    lines = list(show.sentences(check_all(adapted(broken("token mean")))))
    assert lines[0].startswith("token mean, in clean, square, ragged")
    assert "an answer weighs in proportion to its length" in lines[2]
    lines = "\n".join(show.sentences([check_case(adapted(broken("exp before the bound")), case_named("empty_row"))]))
    assert lines.startswith("Of 1 cases 0 agree, 0 differ where the paper decides, 1 are open")
    lines = "\n".join(show.sentences([check_case(adapted(broken("nan is hidden")), case_named("trained_nan"))]))
    assert "The paper does not say." in lines
    assert lines.splitlines()[-2] == "  gspo: not finite."
