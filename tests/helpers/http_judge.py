"""A judge for training runs: an OpenAI-compatible endpoint on loopback whose scores are a function of the text."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 resets connections when 16 come at once

    def __init__(self):
        self.asked, self.lock = [], threading.Lock()
        self.score = lambda completion: 1.0  # None: an error of the server
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def reply(handler: BaseHTTPRequestHandler, status: int, value) -> None:
    """Answer with JSON, or with a text as it is."""
    data = (value if isinstance(value, str) else json.dumps(value)).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@contextlib.contextmanager
def serving(server):
    """The server answers in a thread of its own until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        completion = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked.append(completion)
        score = self.server.score(completion)
        self.send_response(500 if score is None else 200)
        self.end_headers()
        if score is not None:
            answer = {"choices": [{"message": {"content": f"Score: {score}"}}]}
            self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass
