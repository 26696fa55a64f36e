"""Reinforcement learning on GSM8K in one short script: config, data, reward, train.

    python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml
    python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml \
        actor.path=embedded:tiny train_dataset.path=embedded:arithmetic total_train_steps=20   # on this CPU, offline

    python3 -m gspo.launcher.ray examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml   # or .local, .slurm
    python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml scheduler.type=ray      # the same

`gspo train` does the same from the config alone; a script is for data and rewards of your own.
"""

import argparse
import sys

from gspo.config import load
from gspo.data import default_reward, load_dataset
from gspo.models import load_tokenizer
from gspo.train import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="GSPO or GRPO on GSM8K")
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()

    loaded = load(args.config, args.overrides)
    path, limit = loaded.config.train_dataset.path, loaded.config.train_dataset.max_length
    tokenizer = load_tokenizer(loaded.config.actor.path)

    # Rows are mappings: {"question": …, "answer": …}. A list of your own works as well as a named data set.
    train = load_dataset(path, "train", tokenizer=tokenizer, max_length=limit)
    test = load_dataset(path, "test", tokenizer=tokenizer, max_length=limit)

    # A name, or a function of yours: see docs/python.md for the signatures.
    reward = default_reward(path)

    summary = Trainer(loaded, reward=reward, dataset=train, valid=test).train()
    print(summary)
    sys.exit(0 if summary.finished else 130)  # 130: stopped by a signal and saved; the same command goes on


if __name__ == "__main__":
    main()
