"""Run by test_verifiers.py with the interpreter of .venv-verifiers: prints one JSON object."""

import asyncio
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "helpers")]

import talkers  # noqa: E402
from scripted_client import call, scripted  # noqa: E402

from gspo.envs.client import outcome_of  # noqa: E402
from gspo.envs.find import find_environment  # noqa: E402


def episode(env, said, row, **options):
    client = scripted(*said, data={"idx": row["idx"]}, question=row["prompt"], **options)

    async def play():
        try:
            result = await env(client, {"idx": row["idx"]})
            outcome_of(result, {})  # as the driver does
            return result
        except Exception as error:
            return [type(error).__name__, getattr(error, "kind", ""), str(error)]

    return play, client


async def several(env, plays):
    return await asyncio.gather(*(play() for play, _ in plays))


def main():
    found = {}
    env = find_environment("verifiers:gspo_sums")
    train, test = env.rows("train", None), env.rows("test", None)
    found["rows"] = [len(train), len(test), train[0]]
    plays = [episode(env, ["21"], train[0]), episode(env, ["5"], train[0])]
    found["results"] = asyncio.run(several(env, plays))
    found["asked"] = [len(client.exchanges) for _, client in plays]
    plays = [episode(env, ["21"], train[0])]  # another event loop
    found["again"] = asyncio.run(several(env, plays))
    env.close()
    env = find_environment("verifiers:gspo_tools")
    seen = []
    said = iter([call("adder_add", a=10, b=11), f"21{talkers.END}"])
    play, client = episode(env, said, env.rows("train", None)[0], template=talkers.CHATML)
    (found["tools"],) = asyncio.run(several(env, [(play, client)]))
    found["tool prompt"] = client.decode(client.exchanges[-1].prompt) if client.exchanges else seen
    env.close()
    # Only the hanging one needs a short timeout: on a busy machine three seconds are not enough for the other.
    for trouble, timeout in (("raise", 200), ("nan", 200), ("hang", 3)):
        env = find_environment("verifiers:gspo_sums", {"taskset": {"trouble": trouble}, "timeout": timeout})
        (found[trouble],) = asyncio.run(several(env, [episode(env, ["21"], train[0])]))
        env.close()
    for name, options in (("gspo_sums", {"harness": "bash"}), ("no_such_package", {})):
        try:
            find_environment(f"verifiers:{name}", options)
        except Exception as error:
            found[f"{name} {options}"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
