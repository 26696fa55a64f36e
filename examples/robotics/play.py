"""Plays reach.yaml on goals that no run has seen: random moves, a scripted controller, and the policy of a run.

    python examples/robotics/play.py                                       # the two baselines
    python examples/robotics/play.py runs/robotics/reach --json results.json --png reach.png --gif reach.gif

All players answer in the digits of the model, so that all have the same 125 moves. Pictures are rendered without a
display: by EGL, or by what MUJOCO_GL names (osmesa).
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")
warnings.filterwarnings("ignore", module="gymnasium")

import gymnasium  # noqa: E402
import gymnasium_robotics  # noqa: E402
import numpy as np  # noqa: E402

from gspo.config import load  # noqa: E402
from gspo.envs import ActionCodec, ObservationCodec, to_goal  # noqa: E402
from gspo.stats import mean_interval  # noqa: E402

CONFIG = Path(__file__).with_name("reach.yaml")
FIRST_HELD_OUT = 2_000_000  # neither trained on nor evaluated in a run: training begins at 0, evaluation at 1,000,000
LEVELS = 5


def random_policy(rng):
    return lambda text, observation: "".join(map(str, rng.integers(LEVELS, size=3)))


def scripted_policy(text, observation):
    """Along each axis the move, of at most 5 cm, that ends nearest to the goal."""
    share = np.clip(to_goal(observation) / 0.05, -1, 1)  # −1 … 1
    return "".join(str(round(x)) for x in (share + 1) / 2 * (LEVELS - 1))


def model_policy(model, tokenizer):
    """The most likely digits after the whole episode so far."""
    import torch

    digits = tokenizer.encode("".join(map(str, range(LEVELS))), add_special_tokens=False)

    def answer(text, observation):
        out = ""
        for _ in range(3):
            ids = torch.tensor([tokenizer.encode(text + out, add_special_tokens=False)])
            with torch.no_grad():
                out += str(int(model(input_ids=ids).logits[0, -1][digits].argmax()))
        return out

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


class Arena:
    """The environment of reach.yaml, with its codecs."""

    def __init__(self, **make):
        env = load(CONFIG, []).config.env
        gymnasium.register_envs(gymnasium_robotics)
        self.env = gymnasium.make(env.path.removeprefix("gymnasium:"), **make)
        self.see = ObservationCodec(env.options["observation"], self.env.observation_space)
        self.act = ActionCodec(env.options["action"], self.env.action_space)
        self.max_steps = env.options["max_steps"]

    def play(self, policy, seed):
        """Distances to the goal in metres [T + 1], the return, the frames if they are rendered."""
        observation, _ = self.env.reset(seed=seed)
        text, distances, frames = "", [np.linalg.norm(to_goal(observation))], [self.picture()]
        for _ in range(self.max_steps):
            text += self.see.text(observation)
            answer = policy(text, observation)
            text += answer
            observation = self.env.step(self.act.read(answer))[0]
            distances.append(np.linalg.norm(to_goal(observation)))
            frames.append(self.picture())
        # As in training: 1 for every 10 cm nearer, 1 more within 5 cm.
        return np.array(distances), 10 * (distances[0] - distances[-1]) + float(distances[-1] < 0.05), frames

    def picture(self):
        return self.env.render() if self.env.render_mode else None


def draw(shown, path):
    """Distance to the goal over the moves, one line per episode, one panel per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.0 * len(shown), 2.8), sharey=True, squeeze=False)
    for axis, (name, episodes) in zip(axes[0], shown.items(), strict=True):
        for distances in episodes:
            axis.plot(100 * distances, linewidth=1)
        axis.axhline(5, color="grey", linestyle=":")  # nearer than this is a success
        axis.set(title=name, xlabel="moves", ylim=(0, 35))
    axes[0][0].set_ylabel("distance to the goal, cm")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def film(policies, path, seeds):
    """The policies side by side, one episode per seed, as an animation."""
    from PIL import Image, ImageDraw

    arena = Arena(render_mode="rgb_array", width=280, height=280)
    arena.env.reset(seed=0)
    camera = arena.env.unwrapped.mujoco_renderer._get_viewer("rgb_array").cam
    camera.distance, camera.azimuth, camera.elevation, camera.lookat[:] = 1.5, 145, -20, (1.3, 0.75, 0.55)
    pictures = []
    for seed in seeds:
        played = [arena.play(policy, seed)[2] for policy in policies.values()]
        for frames in zip(*played, strict=True):
            picture = Image.fromarray(np.concatenate(frames, axis=1))
            for i, name in enumerate(policies):
                ImageDraw.Draw(picture).text((280 * i + 8, 8), name, fill="white")
            pictures.append(picture.quantize(64))
    times = [700 if i % (arena.max_steps + 1) == arena.max_steps else 250 for i in range(len(pictures))]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=times, loop=0)
    arena.env.close()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run directory of reach.yaml")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--png", help="where to draw the distances")
    parser.add_argument("--gif", help="where to write an animation of the run's policy before and after training")
    parser.add_argument("--json", help="where to write the results")
    given = parser.parse_args(arguments)
    learnt = dict(policies_of(given.run)) if given.run else {}
    policies = {"random": random_policy(np.random.default_rng(0)), "scripted": scripted_policy, **learnt}
    arena, shown, results = Arena(), {}, {}
    for name, policy in policies.items():
        episodes = [arena.play(policy, FIRST_HELD_OUT + i) for i in range(given.episodes)]
        shown[name] = [distances for distances, _, _ in episodes[:16]]
        measured = {
            "success": mean_interval([float(distances[-1] < 0.05) for distances, _, _ in episodes]),
            "return": mean_interval([total for _, total, _ in episodes]),
            "distance_cm": mean_interval([100 * distances[-1] for distances, _, _ in episodes]),
        }
        results[name] = {what: [round(float(x), 4) for x in values] for what, values in measured.items()}
        print(f"{name:16}" + "   ".join(f"{k} {v[0]:.3g} [{v[1]:.3g}, {v[2]:.3g}]" for k, v in results[name].items()))
    if given.png:
        draw(shown, given.png)
    if given.gif:
        film(learnt or policies, given.gif, range(FIRST_HELD_OUT, FIRST_HELD_OUT + 3))
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
