"""An agent as anybody writes one with the `openai` package: it asks for a sum both ways round, trusting two that agree.

`gspo train examples/agent/agent.yaml` trains the model behind `base_url` on what happens here. The agent does not know
that it is being trained: it gets an address, a key and a row of the data set, and says what the episode was worth.
Held-out problems with both sums right, greedy: 28.9 % before, 98.4 % after 40 steps (128 problems, 2 CPU cores).
"""

import openai

# Connections are shared by all episodes; an episode has an address and a key of its own.
SHARED = openai.OpenAI(base_url="http://localhost", api_key="-")


def solve(base_url: str, api_key: str, data: dict) -> float:
    """1 where both ways round come to the right sum, else 0."""
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    a, b = data["question"].rstrip("=").split("+")
    sums = []
    for question in (f"{a}+{b}=", f"{b}+{a}="):
        reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        # The model writes its working, then > and the result.
        sums.append(str(reply.choices[0].message.content).rpartition(">")[2])
    return float(sums == [data["answer"]] * 2)
