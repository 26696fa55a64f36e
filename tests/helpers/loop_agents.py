"""Agents that a training run names. No client library: two calls with the standard library alone."""

import contextlib
import json
import urllib.error
import urllib.request


class Refused(Exception):  # noqa: N818
    pass


def call(base_url, api_key, path, **body):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(json.load(error)["error"]["code"]) from None


def said(base_url, api_key, question, **how):
    messages = [{"role": "user", "content": question}]
    reply = call(base_url, api_key, "/chat/completions", **{"model": "policy", "messages": messages, **how})
    return reply["choices"][0]["message"]["content"]


def both_ways(base_url, api_key, data, temperature=None):
    """Right both ways round; where the reward functions of the config are to judge, None."""
    a, b = data["question"].rstrip("=").split("+")
    answers = [said(base_url, api_key, f"{x}+{y}=", temperature=temperature) for x, y in ((a, b), (b, a))]
    return sum(answer.rpartition(">")[2] == data["answer"] for answer in answers) / 2


def judged(base_url, api_key, data):
    said(base_url, api_key, data["question"])


def troubled(base_url, api_key, data):
    """Every second row meets an agent that asks for another model, and gives up."""
    if int(data["answer"]) % 2:
        said(base_url, api_key, data["question"], model="gpt-4o")
    with contextlib.suppress(Refused):
        call(base_url, api_key, "/chat/completions", wrong=1)
    return both_ways(base_url, api_key, data)
