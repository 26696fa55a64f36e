"""Sampler servers inside the test process, and a proxy that loses or falsifies what they say."""

import json
import threading
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch
from http_judge import reply
from tiny_models import OTHERS, VOCAB, build

from gspo.sampling import HttpSampler, LocalSampler, SamplerEngine, SamplerServer, register, sequence_logp

TOKEN = "a secret of the tests"
IDENTITY = {"num_vocab": VOCAB, "seed": 5}
EOS = 2


def local(model, **kwargs):
    # Only models that continuous batching cannot serve need the choice of an engine.
    choose = model.config.model_type in OTHERS
    return LocalSampler(model, **{"seed": 5, "eos_token_ids": [EOS], "verify": choose, **kwargs})


class House:
    """Starts servers and clients in a folder and closes all of them."""

    def __init__(self, folder):
        self.folder, self.stack = folder, ExitStack()
        self.samplers = folder / "samplers"

    def serve(self, index=0, model="llama", identity=IDENTITY, latency_s=0.0, meddle=None, score=True, vocabulary=None):
        """A real server with random weights of its own; `meddle` puts a proxy before it."""
        module = build(model, seed=99)
        engine = SamplerEngine(
            local(module, version=-1),
            identity=identity,
            score=partial(sequence_logp, module) if score else None,
            vocabulary=vocabulary,
            latency_s=latency_s,
        )
        server = SamplerServer(engine, TOKEN)
        self.stack.callback(server.close)
        server.model, server.index = module, index
        url = server.url
        if meddle is not None:
            server.proxy = Meddler(server, meddle)
            threading.Thread(target=server.proxy.serve_forever, daemon=True).start()
            self.stack.callback(server.proxy.close)
            url = f"http://127.0.0.1:{server.proxy.server_address[1]}"
        register(self.samplers, index, url)
        return server

    def client(self, count=1, reference=None, **kwargs):
        said = []
        client = HttpSampler(
            self.samplers,
            count,
            TOKEN,
            **{
                "identity": IDENTITY,
                "max_context": 64,
                "ends": [EOS],
                "weight_store": lambda _: self.folder / "weights",
                "dtype": torch.float32,
                "reference": None if reference is None else partial(sequence_logp, reference),
                "timeout_s": 5.0,
                "say": said.append,
                "sees_text": False,
                **kwargs,
            },
        )
        self.stack.callback(client.close)
        client.said = said
        return client

    def trained(self, model, count=1, version=0, **kwargs):
        """A client that has published the model's weights and compares the servers' log-probs with its own."""
        client = self.client(count, reference=model, **kwargs)
        client.load_weights(version, model.named_parameters())
        return client

    def close(self):
        self.stack.close()


class Meddler(ThreadingHTTPServer):
    """Passes everything on to a server. `meddle(path, reply)` returns the reply to give, or None to lose it."""

    daemon_threads = True

    def __init__(self, server, meddle):
        self.target, self.meddle, self.paths = server, meddle, []
        super().__init__(("127.0.0.1", 0), _Passing)

    def handle_error(self, *_):
        pass

    def close(self):
        self.shutdown()
        self.server_close()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.paths.append(self.path)
        address = urlsplit(self.server.target.url)
        connection = HTTPConnection(address.hostname, address.port, timeout=20)
        head = {"Authorization": self.headers["Authorization"], "Content-Type": "application/json"}
        connection.request(self.command, self.path, body or None, head)
        response = connection.getresponse()
        status, said = response.status, json.loads(response.read())
        connection.close()
        said = self.server.meddle(self.path, said)
        if said is None:
            self.close_connection = True  # it was done, and nobody hears of it
            return
        reply(self, status, said)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_):
        pass
