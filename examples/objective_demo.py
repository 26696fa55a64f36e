"""What GSPO and GRPO do to the same batch: one picture.

    python examples/objective_demo.py [OUT.png]

Eight completions of different lengths were drawn under π_old; π_θ has drifted a little. Each algorithm sees the same
log-probs and advantages, at its own published clip range. The drift is synthetic (seeded noise, see `drifted_batch`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

from gspo.objectives import loss

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#9AA0A6"  # distinguishable to colour-blind eyes


def drifted_batch(seed: int = 1) -> tuple[torch.Tensor, ...]:
    """logp, proximal_logp, advantage, mask of eight completions, 60 to 1,800 tokens long.

    Between π_old and π_θ every token's log-prob moves by about 0.5 %, and two tokens in a thousand move far.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([60, 120, 200, 350, 600, 900, 1300, 1800])
    shape = (8, 1800)
    mask = torch.arange(shape[1]) < lengths.unsqueeze(-1)
    proximal_logp = -torch.rand(shape, generator=g) * 2
    noise = 0.005 * torch.randn(shape, generator=g)
    noise += (torch.rand(shape, generator=g) < 0.002) * 0.25 * torch.randn(shape, generator=g)
    advantage = torch.tensor([1.2, -0.9, -1.1, 0.8, 1.0, -0.7, 0.9, -1.2])
    # An earlier mini-batch has already raised what was good and lowered what was bad, a little.
    return proximal_logp + noise + 1e-4 * advantage.unsqueeze(-1), proximal_logp, advantage, mask


def weights(name: str, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient weight of each token (−∂loss/∂log π), and who was clipped, token-shaped."""
    logp, proximal_logp, advantage, mask = batch
    leaf = logp.clone().requires_grad_()
    out = loss(name, leaf, proximal_logp, advantage, mask)
    clipped = out.clipped if out.clipped.ndim == 2 else out.clipped.unsqueeze(-1).expand_as(mask)
    return -torch.autograd.grad(out.loss, leaf)[0], clipped & mask


def draw(path: Path) -> None:
    batch = drifted_batch()
    logp, proximal_logp, advantage, mask = batch
    log_ratio = logp - proximal_logp
    log_s = (log_ratio * mask).sum(-1) / mask.sum(-1)
    grpo, grpo_clipped = weights("grpo", batch)
    gspo, gspo_clipped = weights("gspo", batch)
    row = torch.arange(8).unsqueeze(-1).expand_as(mask)
    labels = [f"{int(n)} tokens\nA = {a:+.1f}" for n, a in zip(mask.sum(-1), advantage, strict=True)]

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 4, figsize=(14, 4.9), sharey=True, layout="constrained")
    jitter = (torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) - 0.5) * 0.55
    height = row + jitter

    def dots(axis, x, clipped, size):
        for keep, colour in ((mask & ~clipped, BLUE), (clipped, ORANGE)):
            axis.scatter(x[keep], height[keep], s=size, color=colour, alpha=0.5, linewidths=0, rasterized=True)

    dots(axes[0], log_ratio.exp(), grpo_clipped, 9)
    axes[0].axvspan(0.8, 1.2, color=GREY, alpha=0.18)
    axes[0].set(title="GRPO: one ratio per token", xlabel="token ratio wᵢₜ   (band 1 ± 0.2)")

    one = gspo_clipped.any(-1)
    axes[1].axvspan(1 - 3e-4, 1 + 4e-4, color=GREY, alpha=0.3)
    axes[1].axvline(1, color=GREY, lw=0.8)
    axes[1].scatter(log_s.exp(), range(8), s=70, color=[ORANGE if c else BLUE for c in one], zorder=3)
    axes[1].ticklabel_format(useOffset=False)
    axes[1].set(title="GSPO: one ratio per completion", xlabel="sequence ratio sᵢ   (band 1 − 3e-4 … 1 + 4e-4)")
    axes[1].tick_params(axis="x", rotation=20)

    scale = mask.sum(-1, keepdim=True) * 8  # undo 1/(B·|y|): what is left is ratio × advantage
    dots(axes[2], grpo * scale, grpo_clipped, 9)
    axes[2].set(title="GRPO: gradient weight per token", xlabel="weight on ∇log π(yᵢₜ), × B·|yᵢ|")
    dots(axes[3], gspo * scale, gspo_clipped, 9)
    axes[3].set(title="GSPO: gradient weight per token", xlabel="weight on ∇log π(yᵢₜ), × B·|yᵢ|")
    limit = 1.1 * float((grpo * scale).abs().max())
    for axis in axes[2:]:
        axis.set_xlim(-limit, limit)
        axis.axvline(0, color=GREY, lw=0.8)
    axes[0].set_yticks(range(8), labels)

    total = int(mask.sum())
    share = {n: int(c.sum()) / total for n, c in (("GRPO", grpo_clipped), ("GSPO", gspo_clipped))}
    figure.suptitle(
        f"The same eight completions, a little after π_old. Orange: clipped. "
        f"GRPO clips {share['GRPO']:.2%} of tokens, GSPO {share['GSPO']:.1%}, as whole completions.",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"{'':6}{'clipped tokens':>16}{'clipped completions':>21}{'weight inside a completion':>28}")
    for name, g, clipped in (("GRPO", grpo, grpo_clipped), ("GSPO", gspo, gspo_clipped)):
        ratio = (g * scale / advantage.unsqueeze(-1))[mask & ~clipped]
        touched = f"{int(clipped.any(-1).sum())} / 8"
        print(f"{name:6}{share[name]:>16.2%}{touched:>21}{f'{ratio.min():.4f} … {ratio.max():.4f}':>28}")
    print(f"picture: {path}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/img/objective_demo.png"))
