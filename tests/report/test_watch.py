"""The live page's server: what is new and no more, through restarts and resumes; 4xx to whoever has no business."""

import http.client
import json
import socket
import threading
from urllib.parse import quote

import pytest
from made_runs import append_metrics, make_run, make_trial, sample_row, step_row, write_samples

from gspo.report.page.watch import Watch

pytestmark = pytest.mark.run


@pytest.fixture
def run(tmp_path):
    return make_trial(tmp_path, 2)


@pytest.fixture
def serve():
    """Starts servers over paths; ends them with the test."""
    started = []

    def start(path):
        watch = Watch(path, lambda run: {"unreadable": "not asked"})
        started.append(watch)
        return watch

    yield start
    for watch in started:
        watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "http server"]


def ask(watch, path, method="GET", headers=None, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", watch.port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers
    finally:
        connection.close()


def news(watch, name="trial", have=None):
    have = have or {"generation": "", "rows": 0, "mark": 0}
    status, body, _ = ask(
        watch, f"/{watch.token}/data?run={quote(name)}&" + "&".join(f"{k}={v}" for k, v in have.items())
    )
    assert status == 200
    return json.loads(body)


class Page:
    """What a page keeps of the answers."""

    def __init__(self, watch, name="trial"):
        self.watch, self.name, self.steps, self.samples = watch, name, [], set()
        self.have = {"generation": "", "rows": 0, "mark": 0}

    def ask(self):
        found = news(self.watch, self.name, self.have)
        if found["generation"] != self.have["generation"]:
            self.steps, self.samples = [], set()
        self.steps += [row[found["metrics"]["names"].index("step")] for row in found["metrics"]["rows"]]
        gone = {step for kind, step in found["gone"] if kind == "samples"}
        self.samples = (self.samples - gone) | {block["step"] for block in found["samples"]}
        self.have = {"generation": found["generation"], "rows": len(self.steps), "mark": found["mark"]}
        return found


def test_only_what_is_new_is_sent(run, serve):
    page = Page(serve(run))
    first = page.ask()
    assert (page.steps, page.samples) == ([0, 1, 2], {1, 2})
    assert first["overview"]["name"] == "exp/trial"
    again = page.ask()
    assert not again["changed"]
    assert (again["samples"], again["metrics"]["rows"]) == ([], [])
    assert "overview" not in again
    append_metrics(run, step_row(3))
    write_samples(run, 3, [sample_row(3, 0)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # being written
    more = page.ask()
    assert [block["step"] for block in more["samples"]] == [3]
    assert page.steps == [0, 1, 2, 3]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('ard/mean": 1.0}\n')
    page.ask()
    assert page.steps == [0, 1, 2, 3, 4]


def test_a_file_that_a_resume_cut_back_and_wrote_again_is_read_anew(run, serve):
    page = Page(serve(run))
    page.ask()
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(text[:2]))  # back to step 1
    (run / "samples" / "step_000002.jsonl").unlink()
    page.ask()
    assert (page.steps, page.samples) == ([0, 1], {1})
    # Cut and grown beyond its old size between two questions: the last line that was read is not there any more.
    (run / "metrics.jsonl").write_text(
        text[0] + "".join(json.dumps(step_row(s, note="x" * 300)) + "\n" for s in (1, 2, 3))
    )
    write_samples(run, 2, [sample_row(2, 0, completion="again")])
    page.ask()
    assert (page.steps, page.samples) == ([0, 1, 2, 3], {1, 2})


def test_samples_that_were_deleted_or_rewritten_change_alone(run, serve):
    page = Page(serve(run))
    page.ask()
    (run / "samples" / "step_000001.jsonl").unlink()  # rollout.dump_to_file: N
    page.ask()
    assert page.samples == {2}
    write_samples(run, 2, [sample_row(2, 0, completion="longer than before " * 9)])
    append_metrics(run, step_row(3))
    assert [block["step"] for block in page.ask()["samples"]] == [2]
    assert page.samples == {2}


def test_a_page_that_outlived_its_server_starts_over(run, serve):
    page = Page(serve(run))
    page.ask()
    page.watch = serve(run)
    page.ask()
    assert (page.steps, page.samples) == ([0, 1, 2], {1, 2})


def test_a_run_that_is_not_there_yet_appears(tmp_path, serve):
    watch = serve(tmp_path)
    assert json.loads(ask(watch, f"/{watch.token}/runs")[1])["runs"] == []
    run = make_run(tmp_path / "exp" / "new", [])
    page = Page(watch, "exp/new")
    assert page.ask()["age"] is None
    append_metrics(run, step_row(1))
    page.ask()
    assert page.steps == [1]


def test_a_folder_lists_its_runs_with_their_figures(tmp_path, run, serve):
    make_run(tmp_path / "exp" / "other", [])
    watch = serve(tmp_path)
    runs = json.loads(ask(watch, f"/{watch.token}/runs")[1])["runs"]
    assert [r["id"] for r in runs] == ["exp/trial", "exp/other"]
    assert (runs[0]["steps"], runs[0]["held_out"], runs[0]["algorithm"]) == (2, "30.0%", "gspo")
    for path in ("", "page?run=exp/trial"):
        status, body, _ = ask(watch, f"/{watch.token}/{path}")
        assert status == 200
        assert b"connect-src &#x27;self&#x27;" in body


def test_every_answer_forbids_frames_caches_and_guesses(run, serve):
    watch = serve(run)
    for path in (f"/{watch.token}/", "/"):
        headers = ask(watch, path)[2]
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


ROUTES = ("", "data?run=trial", "page?run=trial", "runs", "config.yaml", "../config.yaml", "%2e%2e/metrics.jsonl")


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_the_token(route, run, serve):
    watch = serve(run)
    for token in (
        "",
        "wrong",
        watch.token[:-1],
        watch.token + "x",
        watch.token.swapcase(),
        "%00",
        "\u00e9".encode().hex(),
    ):
        status, body, _ = ask(watch, f"/{token}/{route}" if token else f"/{route}")
        assert status == 403
        assert b"trial" not in body


@pytest.mark.parametrize(
    "query",
    [
        "data?run=../exp/trial",
        "data?run=/etc",
        "data",
        "page?run=..%2f..",
        "config.yaml",
        "../x",
        "data/",
        "?" + "&".join("a=1" for _ in range(50)),
    ],
)
def test_what_is_no_route_is_not_found(query, tmp_path, run, serve):
    watch = serve(tmp_path)
    assert ask(watch, f"/{watch.token}/{query}")[0] in (400, 404)


def test_its_own_pages_and_names_are_served(run, serve):
    watch = serve(run)
    for headers in ({"Origin": f"http://127.0.0.1:{watch.port}"}, {"Host": f"localhost:{watch.port}"}):
        assert ask(watch, f"/{watch.token}/", headers=headers)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"])
def test_get_is_the_only_method(method, run, serve):
    watch = serve(run)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    status, _, _ = ask(watch, f"/{watch.token}/", method=method, body=b"x" if method == "POST" else None)
    assert status == (400 if method == "BREW" else 405)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_it_listens_on_this_machine_alone(run, serve):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", serve(run).port), timeout=5)
