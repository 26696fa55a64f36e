"""The part of the Hugging Face hub's HTTP interface that an upload uses, on loopback: repositories, LFS, commits.

Written after the requests of huggingface_hub 2.4; large files come by Git LFS (HF_HUB_DISABLE_XET=1).
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_fake_token_of_the_tests"


class Hub:
    """repositories: name → {"private": bool, "files": {path: bytes}, "message": str}."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by sha256
        self.asked: list[str] = []
        self.fail_commits = False
        self.url = ""


def problems_of_card(text: str) -> list[str]:
    """What the hub's check of a model card's front matter looks at."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    head = yaml.safe_load(found[1]) if found else None
    if not isinstance(head, dict):
        return ["no front matter"]
    problems = [f"{key} must be a list of strings" for key in ("tags", "datasets")
                if key in head and not all(isinstance(item, str) for item in head[key])]  # fmt: skip
    for model in head.get("model-index", []):
        for result in model["results"]:
            if not (result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]):
                problems.append("model-index: task.type, dataset.type and dataset.name are required")
            problems += ["a metric has no value" for m in result["metrics"] if "type" not in m or "value" not in m]
    return problems


@contextlib.contextmanager
def serving():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def _reply(self, value, code=200) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if code >= 400:
                self.send_header("X-Error-Message", str(value.get("error")))
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_PUT(self) -> None:
            body = self._body()
            digest = self.path.rsplit("/", 1)[-1]
            if hashlib.sha256(body).hexdigest() != digest:
                return self._reply({"error": "the sha256 differs"}, 400)
            hub.objects[digest] = body
            return self._reply({})

        def do_GET(self) -> None:
            hub.asked.append(f"GET {self.path}")
            name = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*)?", self.path.partition("?")[0])
            if name and name[1] in hub.repositories:
                return self._reply({"id": name[1], "sha": "0" * 40, "siblings": []})
            return self._reply({"error": "Repository Not Found"}, 404)

        def do_POST(self) -> None:
            body, path = self._body(), self.path.partition("?")[0]
            hub.asked.append(f"POST {path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._reply({"error": "Invalid username or password."}, 401)
            if path == "/api/repos/create":
                given = json.loads(body)
                name = f"{given['organization']}/{given['name']}"
                if name in hub.repositories:
                    return self._reply(
                        {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409
                    )
                private = given.get("private", given.get("visibility") == "private")
                hub.repositories[name] = {"private": private, "files": {}, "message": ""}
                return self._reply({"url": f"{hub.url}/{name}", "name": name, "id": name})
            if path == "/api/validate-yaml":
                problems = problems_of_card(json.loads(body)["content"])
                return self._reply(
                    {"errors": [{"message": p} for p in problems], "warnings": []}, 400 * bool(problems) or 200
                )
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
                modes = {True: "lfs", False: "regular"}
                files = [{"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")],
                          "shouldIgnore": False} for f in json.loads(body)["files"]]  # fmt: skip
                return (
                    self._reply({"files": files}) if found[1] in hub.repositories else self._reply({"error": ""}, 404)
                )
            if path.endswith(".git/info/lfs/objects/batch"):
                objects = [{**o, "actions": {"upload": {"href": f"{hub.url}/upload/{o['oid']}"}}}
                           for o in json.loads(body)["objects"]]  # fmt: skip
                return self._reply({"transfer": "basic", "objects": objects})
            if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path)) and not hub.fail_commits:
                repository = hub.repositories[found[1]]
                for line in body.decode().splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "header":
                        repository["message"] = value["summary"]
                    elif entry["key"] == "file":
                        repository["files"][value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        repository["files"][value["path"]] = hub.objects[value["oid"]]
                url = f"{hub.url}/{found[1]}/commit/{'1' * 40}"
                return self._reply({"commitUrl": url, "commitOid": "1" * 40, "success": True})
            return self._reply({"error": "not possible here"}, 403)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
