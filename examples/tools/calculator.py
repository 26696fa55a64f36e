"""A tiny model learns to use a tool, in minutes on a CPU: `python examples/tools/calculator.py`.

Held-out five-digit sums, greedy answers, three numbers: the model without the tool, with it before training, and with
it after. Measured (256 problems, seed 1, threads 1): 0.0 % (interval to 1.5), 0.0 %, and after 30 steps 98.0 % (95.5 to
99.2). Before training it asks in a third of its samples and never when greedy: the first step's mean reward is 0.31.

The same training without a script is `gspo train examples/tools/calculator.yaml`, and an evaluation without the tool
`gspo eval runs/tools/calculator env.path=null`: what was trained is to ask, and 0.0 % are right without it.
"""

import sys

from gspo.config import load
from gspo.report import read_metrics
from gspo.train import Trainer, evaluate_run

CONFIG = "examples/tools/calculator.yaml"


def accuracy(*overrides):
    """Of the model that training starts from."""
    result = evaluate_run(load(CONFIG, [*sys.argv[1:], *overrides]).config, None, 0)
    return result["avg"]["value"]


if __name__ == "__main__":
    alone = accuracy("env.path=null")
    before = accuracy()
    run = Trainer(CONFIG, overrides=sys.argv[1:]).train().path
    after = max(row["eval/accuracy"] for row in read_metrics(run) if "eval/accuracy" in row)
    print(f"without the tool {alone:.1%}, with it {before:.1%}, after training {after:.1%}")
