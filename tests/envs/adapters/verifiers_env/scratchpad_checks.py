"""Run by test_verifiers.py with the interpreter of .venv-verifiers: plays `scratchpad` and prints one JSON object."""

import asyncio
import json

from checks import call, episode, find_environment, several, talkers

env = find_environment("verifiers:scratchpad")
rows = env.rows("train", None)
plays = [
    episode(env, [call("scratchpad_roundtrip", word=word), f"{word}{talkers.END}"], row, template=talkers.CHATML)
    for word, row in (("alpha", rows[0]), ("bravo", rows[1]))
]
print(json.dumps({"rows": len(rows), "results": asyncio.run(several(env, plays))}))
env.close()
