"""Distillation: the teacher's log-ratios as advantages, and its exact KL as a loss, in float64."""

import copy
from functools import partial

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, make_group, padded
from made_steps import descend, make_plan, sgd, weights
from test_reference import moved

from gspo.learner.credit import with_teacher_advantages
from gspo.learner.policy.divergence import Head, divergence_of
from gspo.learner.policy.head import HeadForm
from gspo.learner.policy.module import PolicyModule
from gspo.learner.reference import Reference, Teacher, reference_logp, served_logp
from gspo.learner.step import train_step
from gspo.learner.world import ALONE
from gspo.sampling import sequence_logp

FORM = HeadForm(chunk_size=3, fp32=True, with_entropy=True, entropy_grad=False)
TEMPERATURE = 0.8


def heads(softcap=None, student_rows=11, teacher_rows=11):
    torch.manual_seed(0)
    made = [
        torch.randn(*shape, dtype=torch.float64) for shape in ((7, 4), (student_rows, 4), (7, 6), (teacher_rows, 6))
    ]
    bias = torch.randn(student_rows, dtype=torch.float64)
    student = [t.requires_grad_() for t in (made[0], made[1], bias)]
    return student, Head(made[2], made[3], None, 1 / TEMPERATURE, softcap, TEMPERATURE)


def plain(hidden, weight, bias, softcap):
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return (z / TEMPERATURE).log_softmax(-1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_chunked_kl_and_its_gradients_are_those_of_the_plain_formula(share, softcap):
    student, teacher = heads(softcap)
    own = Head(*student, 1 / TEMPERATURE, softcap, TEMPERATURE)
    got = divergence_of(own, teacher, share, FORM)
    logp, logq = plain(*student, softcap), plain(teacher.hidden, teacher.weight, None, softcap)
    forward, reverse = (logq.exp() * (logq - logp)).sum(-1), (logp.exp() * (logp - logq)).sum(-1)
    want = share * forward + (1 - share) * reverse
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    upstream = torch.linspace(-1, 2, len(got), dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(x, student, upstream) for x in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_a_teacher_that_is_the_student_has_kl_and_gradient_zero():
    student, _ = heads()
    own = Head(*student, 1 / TEMPERATURE, None, TEMPERATURE)
    got = divergence_of(own, Head(*(t.detach() for t in own[:3]), *own[3:]), 0.5, FORM)
    assert got.abs().max() < 1e-12
    assert all(g.abs().max() < 1e-12 for g in torch.autograd.grad(got.sum(), student))


def test_rows_of_a_padded_vocabulary_are_left_out():
    student, teacher = heads(teacher_rows=16)
    own = Head(*student, 1 / TEMPERATURE, None, TEMPERATURE)
    same = divergence_of(own, teacher._replace(weight=teacher.weight[:11]), 0.5, FORM)
    assert torch.equal(divergence_of(own, teacher, 0.5, FORM), same)


def test_log_ratios_become_advantages_and_are_zero_for_the_same_policy():
    batch = make_batch([make_group(0, [0, 1], [3, 2]), make_group(1, [0, 0], [1, 4])])
    behavior = {i: s.behavior_logp[s.mask].astype(np.float64) for i, s in enumerate(batch.samples)}
    same = with_teacher_advantages(make_batch(batch.groups, norm="teacher"), behavior, 1.0)
    assert not same.has_gradient.any()
    assert not np.abs(same.teacher_kl).any()
    better = {i: logp + 0.5 for i, logp in behavior.items()}
    alone = with_teacher_advantages(make_batch(batch.groups, norm="teacher"), better, 2.0)
    assert all((a == 1.0).all() for a in alone.token_advantages.values())
    assert alone.teacher_kl.tolist() == [-0.5] * 4
    mixed = with_teacher_advantages(batch, better, 2.0)  # beside a reward
    assert all((mixed.token_advantages[i] == batch.advantages[i] + 1.0).all() for i in range(4))
    measured = with_teacher_advantages(batch, better, 0.0)  # exact KL: only measured
    assert measured.token_advantages is None


@pytest.mark.parametrize("max_tokens", [25, 8192])
def test_an_update_by_the_exact_kl_is_the_plain_one(max_tokens, exact):
    model = model_zoo.build("qwen3")
    batch = make_batch([make_group(0, [0, 0], [3, 5]), make_group(1, [0, 0], [1, 4], prompt=(4, 5))], norm="teacher")
    teacher = moved(model, 0.1)
    expected = copy.deepcopy(model)
    ids, attention, source, mask = padded(batch, np.ones(4, bool))
    logs = [m(input_ids=ids, attention_mask=attention).logits for m in (expected, teacher)]
    at = source[..., None].expand(-1, -1, logs[0].shape[-1])
    logp, logq = ((x.gather(1, at) / TEMPERATURE).log_softmax(-1) for x in logs)  # [B, T, V]
    gap = logp - logq.detach()
    kl = 0.75 * (logp.exp() * gap).sum(-1) - 0.25 * (logq.detach().exp() * gap).sum(-1)
    (2.0 * kl[mask].sum() / mask.sum()).backward()
    descend(expected)
    policy = PolicyModule(model)
    frozen = PolicyModule(teacher).requires_grad_(False)
    plan = make_plan("distill", max_tokens=max_tokens, skip_zero_advantage=False)
    report = train_step(
        policy, sgd(policy), batch, plan, proximal="recompute", learning_rates=[1.0],
        teacher=Teacher(dict, coef=2.0, exact_kl=0.25, policy=frozen),
    )  # fmt: skip
    assert report.losses[0] == pytest.approx(2.0 * float(kl[mask].detach().mean()))
    for name, weight in weights(expected).items():
        torch.testing.assert_close(weights(model)[name], weight, rtol=1e-8, atol=1e-10)
    got = reference_logp(Reference(frozen, TEMPERATURE, 8192), batch)
    assert got.keys() == {0, 1, 2, 3}


def test_a_server_that_scores_whole_sequences_gives_the_log_probs_of_the_trained_tokens():
    model = model_zoo.build("qwen3")
    batch = make_batch([make_group(0, [0, 0], [3, 5]), make_group(1, [0, 0], [1, 4], prompt=(4, 5))], norm="teacher")
    batch.samples[1].mask[[0, 2]] = False  # tokens of an environment
    here = reference_logp(Reference(PolicyModule(model), 1.0, 8192), batch)
    served = served_logp(partial(sequence_logp, model), ALONE, batch)
    assert served.keys() == here.keys()
    for i, expected in here.items():
        assert len(expected) == batch.trained_tokens[i]
        np.testing.assert_allclose(served[i], expected, atol=1e-6)
