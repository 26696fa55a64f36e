"""A small HTTP server that speaks as vLLM does, over a tiny model of transformers, and misbehaves on request.

It is there for what a real vLLM cannot be made to do: lie, hang, answer for another model, keep an old head.
"""

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np
import torch
from http_judge import reply

from gspo.models import routed, routers
from gspo.sampling import NAME, EngineAddress, copy_weights, read_published, sequence_logp, warp


class Lookalike(ThreadingHTTPServer):
    """`meddle(body, reply)` changes a reply of /v1/completions: a dict, (status, dict), or None to hang up on it."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, model, meddle=None, pace_s=0.0, stale=()):
        self.model, self.meddle, self.pace_s, self.stale = model, meddle, pace_s, tuple(stale)
        self.calls, self.made, self.results = [], 0, {}
        self.routes = {}  # others, or instead of its own: by path, a function of the body
        self.heard = []  # (path, key, body)
        self.epoch = 0  # raised by /pause: whoever writes then stops
        self.paused = False
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = EngineAddress(f"http://127.0.0.1:{self.server_address[1]}")
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass

    def close(self):
        self.epoch += 1
        self.shutdown()
        self.server_close()

    def complete(self, body):
        epoch, prompt, tokens, logps, finish = self.epoch, body["prompt"], [], [], "length"
        tops = []
        torch_rng = torch.Generator().manual_seed(body.get("seed", 0) % 2**62)
        while len(tokens) < body["max_tokens"]:
            time.sleep(self.pace_s)
            if epoch != self.epoch:
                finish = "abort"
                break
            with self.lock, torch.no_grad():
                logits = self.model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].double()
            if body["temperature"]:
                logits = logits / body["temperature"]
            if body.get("top_k"):
                logits[logits < torch.topk(logits, min(body["top_k"], len(logits))).values[-1]] = -torch.inf
            if body.get("top_p", 1) < 1:
                logits = warp(logits[None], top_p=body["top_p"])[0]
            logp = torch.log_softmax(logits, -1)
            drawn = torch.multinomial(logp.exp(), 1, generator=torch_rng) if body["temperature"] else logp.argmax()
            tokens.append(int(drawn))
            logps.append(float(logp[tokens[-1]]))
            # As vLLM: the sampled token, then the most likely ones; −9999 where a token is not kept.
            named = [tokens[-1], *torch.topk(logp, min(body.get("logprobs") or 0, len(logp))).indices.tolist()]
            tops.append({f"token_id:{t}": max(float(logp[t]), -9999.0) for t in named})
            self.made += 1
            if tokens[-1] in body.get("stop_token_ids", []):
                finish = "stop"
                break
        choice = {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logps, "top_logprobs": tops},
            "finish_reason": finish,
        }
        if body.get("prompt_logprobs") is not None:
            said = sequence_logp(self.model, [prompt])[0].astype(float).tolist()
            choice["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": p}} for t, p in zip(prompt[1:], said, strict=True)),
            ]
        if routers(self.model) and finish != "abort":
            choice["routed_experts"] = self.routed_experts([*prompt, *tokens][:-1])
        return {"model": NAME, "choices": [choice]}

    def routed_experts(self, tokens):
        """As vLLM with --enable-return-routed-experts: base64 of a .npy, [positions, layers, top_k]."""
        with self.lock, torch.no_grad(), routed(routers(self.model)) as recorder:
            self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        file = io.BytesIO()
        np.save(file, recorder.routes())
        return base64.b64encode(file.getvalue()).decode()

    def rpc(self, method, args):
        if method in self.results:
            return self.results[method]
        if method == "gspo_state":
            return {"pid": 1, "device": "cpu", "version": None}
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in self.stale}
        try:
            with self.lock:
                copy_weights(self.model, read_published(args[1], args[2]).items())
                for name, before in kept.items():
                    self.model.get_parameter(name).data.copy_(before)
        except Exception as error:
            return {"refused": str(error)}
        return {"version": int(args[0]), "pid": 1}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body, server, path = json.loads(text) if text else {}, self.server, urlsplit(self.path).path
        server.calls.append(path)
        server.heard.append((path, self.headers.get("Authorization"), body))
        status, said = 200, {}
        if path in server.routes:
            status, said = server.routes[path](body)
        elif path == "/v1/completions":
            said = server.complete(body)
            if server.meddle is not None and body.get("return_token_ids") and body.get("top_k") != 1:
                said = server.meddle(body, said)
            if isinstance(said, tuple):
                status, said = said
        elif path == "/collective_rpc":
            said = {"results": [server.rpc(body["method"], body["args"])]}
        elif path == "/pause":
            server.epoch += 1
        elif path == "/v1/models":
            said = {"data": [{"id": NAME}]}
        elif path == "/metrics":
            said = f'# HELP x\nvllm:generation_tokens_total{{engine="0"}} {server.made}.0\n'
        if said is None:
            self.close_connection = True
            return
        reply(self, status, said)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_):
        pass
