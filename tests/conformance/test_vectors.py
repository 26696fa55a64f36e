"""The files of the suite, and the loops of the papers that their answers come from."""

import ast
import inspect
import json
import math

import pytest
import torch

from gspo.conformance import VECTORS, load, paper
from gspo.errors import ConfigError

SETTINGS = {
    "clip_low": 0.2, "clip_high": 0.3, "weight_max": 1.2, "tau_pos": 1.0, "tau_neg": 1.05, "log_clip_low": 0.1,
    "log_clip_high": 0.1, "max_new_tokens": 8,
}  # fmt: skip


def small_batch():
    """Two sequences of three and two tokens; row 1 has one masked place."""
    return {
        "logp": [[-1.0, -0.5, -2.0], [-0.3, -9.0, -1.4]],
        "proximal_logp": [[-1.15, -0.6, -1.95], [-0.2, 5.0, -1.45]],
        "behavior_logp": [[-1.0, -0.7, -2.0], [-0.25, 0.0, -1.4]],
        "reference_logp": [[-1.2, -0.4, -2.2], [-0.5, 0.0, -1.3]],
        "advantage": [[1.0, 0.5, 1.0], [-0.7, 0.0, -0.4]],
        "turn": [[0, 1, 1], [0, 0, 0]],
        "mask": [[1, 1, 1], [1, 0, 1]],
    }


@pytest.mark.parametrize("name", paper.OBJECTIVES)
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
def test_a_gradient_of_the_loops_is_the_slope_of_their_loss(name, kl):
    terms, aggregation = paper.OBJECTIVES[name]
    settings = SETTINGS | ({"kl_coef": 0.3, "kl_estimator": kl} if kl else {})
    batch = small_batch()
    if name not in ("ppo", "decoupled_ppo", "gspo_token"):
        batch["advantage"] = [1.0, -0.7]
    # Loops hold a ratio fixed where the paper stops its gradient, and so does the difference quotient.
    held = {"gspo_token": "log_s", "cispo": "log_ratios"}.get(name)
    for i, t in [(0, 0), (0, 2), (1, 2)]:
        around = []
        for step in (1e-6, -1e-6):
            moved = [list(row) for row in batch["logp"]]
            moved[i][t] += step
            if held:
                around.append(held_loss(name, batch, moved, settings))
            else:
                around.append(paper.evaluate({**batch, "logp": moved}, terms, aggregation, settings).loss)
        gradient = paper.evaluate(batch, terms, aggregation, settings).gradient[i][t]
        assert (around[0] - around[1]) / 2e-6 == pytest.approx(gradient, abs=1e-8)


def held_loss(name, batch, moved, settings):
    """The loss at `moved` with sg[s_i], or sg[w_it], of `batch`: written from eq. 13–14, and eq. 4 of CISPO."""
    total, num_tokens = 0.0, 5
    for i, row in enumerate(batch["mask"]):
        at = [t for t, m in enumerate(row) if m]
        d = {t: batch["logp"][i][t] - batch["proximal_logp"][i][t] for t in at}
        s = math.exp(sum(d.values()) / len(at))
        for t in at:
            a = batch["advantage"][i] if name == "cispo" else batch["advantage"][i][t]
            if name == "cispo":
                j, weight = min(math.exp(d[t]), 1.2) * a * moved[i][t], 1 / num_tokens
            else:
                ratio = s * math.exp(moved[i][t] - batch["logp"][i][t])
                j, weight = min(ratio * a, min(max(ratio, 0.8), 1.3) * a), 1 / (2 * len(at))
            if "kl_coef" in settings:
                j -= 0.3 * paper.kl(moved[i][t], batch["reference_logp"][i][t], settings["kl_estimator"])[0]
            total -= weight * j
    return total


def test_gspo_by_hand():
    """log s = (0.2, −0.1): e^0.2 = 1.2214 is above 1.2 with A = 1; e^−0.1 with A = −2 is inside."""
    batch = {"logp": [[-1.0, -1.0], [-1.0, 0.0]], "proximal_logp": [[-1.5, -0.9], [-0.9, 7.0]]}
    batch |= {"advantage": [1.0, -2.0], "mask": [[1, 1], [1, 0]]}
    found = paper.evaluate(batch, paper.gspo, "sequence_mean", {"clip_low": 0.2, "clip_high": 0.2})
    assert found.log_s == pytest.approx([0.2, -0.1])
    assert found.loss == pytest.approx((-1.2 + 2 * math.exp(-0.1)) / 2)
    assert found.clipped == [[True, True], [False, False]]
    assert found.gradient[0] == [0.0, 0.0]
    assert found.gradient[1] == [pytest.approx(math.exp(-0.1)), 0.0]


def test_advantages_and_log_probs_by_hand():
    assert paper.group_advantage([1.0, 0.0, 5.0], [0, 0, 1]) == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0])
    assert paper.group_advantage([1.0, 0.0], [0, 0], ddof=0) == [1.0, -1.0]
    # softmax of (0, log 9) is (0.1, 0.9); at temperature 2 the odds are 1 : 3.
    assert paper.token_logp([0.0, math.log(9)], 1, 2.0) == pytest.approx(math.log(0.75))


def test_the_loops_need_neither_torch_nor_our_objectives():
    imported = [ast.unparse(n) for n in ast.walk(ast.parse(inspect.getsource(paper))) if isinstance(n, ast.ImportFrom)]
    assert imported
    assert not [line for line in imported if "gspo" in line or "torch" in line]


def test_every_case_says_what_it_tests_and_which_paper():
    suite = json.loads((VECTORS / "suite.json").read_text())
    for case in suite["cases"]:
        assert all(case[name] for name in ("claim", "source", "meaning", "bites"))
        assert "arXiv" in case["source"]
    names = [case["name"] for case in suite["cases"]]
    assert len(set(names)) == len(names)
    assert sum(file.stat().st_size for file in VECTORS.iterdir()) < 2e6


def test_inputs_are_exact_in_the_type_of_the_case():
    for case in load():
        for name, x in case.inputs.items():
            if name.endswith("logp"):
                there_and_back = x.to(getattr(torch, case.dtype)).to(x.dtype)
                assert torch.equal(there_and_back.nan_to_num(7), x.nan_to_num(7))


def test_no_ratio_is_so_near_a_bound_that_rounding_decides():
    for case in load():
        if case.kind in ("advantage", "logp") or not case.decided or "clip_low" not in case.settings:
            continue
        log_s = case.answers[0].arrays["log_s"]
        for bound in (math.log1p(-case.settings["clip_low"]), math.log1p(case.settings["clip_high"])):
            margin = 5e-3 if case.dtype in ("float16", "bfloat16") else 2e-5
            assert float((log_s - bound).abs().min()) > margin, case.name


def test_an_unknown_case_is_named():
    from gspo.conformance import case_named

    with pytest.raises(ConfigError, match="no case 'nothing'; the cases are clean, square"):
        case_named("nothing")
