"""Plays balance.yaml: a random policy, a scripted controller, and the policy of a run before and after training.

    python examples/robotics/play.py                                  # the two baselines
    python examples/robotics/play.py runs/robotics/balance --png pole.png --json results.json

Every policy answers in the letters and digits of the model, so that all have the same four forces.
"""

import argparse
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np

from gspo.config import load
from gspo.envs.adapters.codecs import ActionCodec, ObservationCodec
from gspo.stats import mean_interval

CONFIG = Path(__file__).with_name("balance.yaml")
FIRST_HELD_OUT = 2_000_000  # neither trained on nor evaluated in a run: training begins at 0, evaluation at 1,000,000


FORCES = np.linspace(-3, 3, 4)


def random_policy(rng):
    return lambda text, state: str(rng.integers(len(FORCES)))


def constant_policy(text, state):
    """One force whatever happens: the best that a policy can do that ignores what it reads."""
    return "1"


def scripted_policy(text, state):
    """A linear controller: push the cart to where the pole falls."""
    return str(int(np.abs(FORCES - np.dot([0.5, 8.0, 1.0, 2.0], state)).argmin()))


def model_policy(model, tokenizer):
    """The most likely force after the whole episode so far."""
    import torch

    digits = tokenizer.encode("".join(map(str, range(len(FORCES)))), add_special_tokens=False)

    def answer(text, state):
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        return str(int(logits[digits].argmax()))

    return answer


def policies_of(run):
    """The policy of a run before training and after its last checkpoint."""
    from safetensors.torch import load_file

    from gspo.models import embedded

    name = load(CONFIG, []).config.actor.path
    model, tokenizer = embedded.build(name)
    yield "before training", model_policy(model.eval(), tokenizer)
    last = max(Path(run).glob("checkpoints/step_*"))
    trained, _ = embedded.build(name)
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(last / "model.safetensors").items()}
    # Not strict: the output layer shares the weights of the embeddings and is not in the file.
    if unexpected := trained.load_state_dict(weights, strict=False).unexpected_keys:
        sys.exit(f"{last} is not a checkpoint of {name}: it has {unexpected[0]}")
    yield f"after {int(last.name.removeprefix('step_'))} steps", model_policy(trained.eval(), tokenizer)


def play(policy, seed, options):
    """The states [T, 4] of an episode and its return."""
    env = gymnasium.make("InvertedPendulum-v5")
    see = ObservationCodec(options["observation"], env.observation_space)
    act = ActionCodec(options["action"], env.action_space)
    state, _ = env.reset(seed=seed)
    text, states, total = "", [state], 0.0
    for _ in range(options["max_steps"]):
        text += see.text(state)
        answer = policy(text, state)
        text += answer
        state, reward, terminated, truncated, _ = env.step(act.read(answer))
        states.append(state)
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return np.array(states), total


def draw(shown, path):
    """Pole angle over time, one line per episode, one panel per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.2 * len(shown), 2.8), sharey=True, squeeze=False)
    for axis, (name, episodes) in zip(axes[0], shown.items(), strict=True):
        for states in episodes:
            axis.plot(0.04 * np.arange(len(states)), np.degrees(states[:, 1]), linewidth=1)
        for fallen in (-11.5, 11.5):  # degrees: the episode ends at 0.2 rad
            axis.axhline(fallen, color="grey", linestyle=":")
        axis.set(title=name, xlabel="seconds", xlim=(0, 2), ylim=(-15, 15))
    axes[0][0].set_ylabel("pole angle, degrees")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run directory of balance.yaml")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--png", help="where to draw the pole's angle")
    parser.add_argument("--json", help="where to write the returns")
    given = parser.parse_args(arguments)
    options = load(CONFIG, []).config.env.options
    policies = {
        "random": random_policy(np.random.default_rng(0)),
        "constant": constant_policy,
        "scripted": scripted_policy,
    }
    policies |= dict(policies_of(given.run)) if given.run else {}
    shown, results = {}, {}
    for name, policy in policies.items():
        episodes = [play(policy, FIRST_HELD_OUT + i, options) for i in range(given.episodes)]
        returns = [total for _, total in episodes]
        mean, low, high = mean_interval(returns)
        standing = float(np.mean([states[-1, 1] ** 2 < 0.04 for states, _ in episodes]))
        results[name] = {"return": mean, "low": low, "high": high, "standing": standing}
        shown[name] = [states for states, _ in episodes[:16]]
        print(f"{name:16} return {mean:5.1f} [{low:.1f}, {high:.1f}] of {options['max_steps']}, "
              f"{100 * standing:.0f} % stand at the end")  # fmt: skip
    if given.png:
        draw(shown, given.png)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
