"""A judge: an OpenAI-compatible endpoint on loopback whose answers the test decides."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    """Answers by `plan`, a function of (number of the request, its last message): the text, or a whole answer of
    (status, content, headers). Without a plan of the test's own `score` decides, a function of the message."""

    daemon_threads = True
    request_queue_size = 128  # the default of 5 resets connections when 16 come at once

    def __init__(self):
        self.requests, self.headers, self.asked, self.at_once, self.most_at_once = [], [], [], 0, 0
        self.lock = threading.Lock()
        self.score = lambda completion: 1.0  # None: an error of the server
        self.plan = self.by_score
        super().__init__(("127.0.0.1", 0), JudgeHandler)

    def by_score(self, number, completion):
        score = self.score(completion)
        return (500, b"", {}) if score is None else f"Score: {score}"

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


class JudgeHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        judge = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with judge.lock:
            judge.requests.append((self.path, body))
            judge.headers.append(dict(self.headers))
            judge.asked.append(question)
            number = len(judge.requests)
            judge.at_once += 1
            judge.most_at_once = max(judge.most_at_once, judge.at_once)
        try:
            answer = judge.plan(number, question)
            status, content, headers = answer if isinstance(answer, tuple) else (200, answer, {})
            if status == 200 and isinstance(content, str):
                content = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass  # the client went away, as it should after its timeout
        finally:
            with judge.lock:
                judge.at_once -= 1

    def log_message(self, *args):
        pass
