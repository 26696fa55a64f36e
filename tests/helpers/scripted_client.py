"""An episode's client whose model says given texts."""

import asyncio
import json
from concurrent.futures import Future

import talkers

from gspo.envs import Client
from gspo.types import Prompt, Request, Sample, SampleId, SamplingParams


def scripted(*answers, template=None, data=None, context=4096, question="12*34="):
    """A client whose model says these texts, one after the other; what it is asked is in `client.asked`."""
    talk = talkers.chat(template)
    tokens = talk.render([{"role": "user", "content": question}])
    origin = Prompt(tokens, question, data or {}, messages=({"role": "user", "content": question},))
    said, asked = iter(answers), []

    def ask(request):
        asked.append(request)
        text = next(said)
        ids = talk.tokenizer.encode(text, add_special_tokens=False)[: request.params.max_new_tokens]
        future = Future()
        future.set_result(Sample.of(request.id, ids, [-0.5] * len(ids), version=0))
        return future

    params = SamplingParams(max_new_tokens=400)
    client = Client(
        Request(SampleId(0, 0), tokens, params, origin=origin), chat=talk, submit=ask, max_turns=9, max_context=context
    )
    client.asked, client.talk = asked, talk
    return client


def play(environment, client):
    return asyncio.run(environment(client, client.prompt.data))


def last_prompt(client):
    return client.talk.tokenizer.decode(client.asked[-1].prompt)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>{talkers.END}"
