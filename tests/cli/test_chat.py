"""`gspo chat`: a conversation with the in-process sampler; its answers are those of a plain greedy decode."""

import io

import pytest
import torch

from gspo.cli import main as cli
from gspo.cli.chat import ChatSession
from gspo.envs import Chat
from gspo.models import load_model, load_tokenizer
from gspo.sampling import LocalSampler
from gspo.types import SamplingParams

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content }}<eos>{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model("embedded:tiny"), load_tokenizer("embedded:tiny")


def session(model, *, template=False, most=48, context=2048):
    policy, tokenizer = model
    sampler = LocalSampler(policy, seed=1, eos_token_ids=(1,), decode=tokenizer.decode)
    return ChatSession(Chat(tokenizer, template), sampler, SamplingParams(most, greedy=True), context)


def greedy(model, tokens, most=48):
    """One whole forward per token."""
    policy, found = model[0], list(tokens)
    for _ in range(most):
        with torch.no_grad():
            found.append(int(policy(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
        if found[-1] == 1:
            break
    return found[len(tokens) :]


def test_an_answer_comes_in_pieces_and_is_the_greedy_one(model):
    pieces = list(session(model).ask("184+768="))
    tokenizer = model[1]
    wanted = tokenizer.decode(greedy(model, tokenizer.encode("184+768=")), skip_special_tokens=True)
    assert "".join(pieces) == wanted
    assert len(pieces) > 10


def test_with_a_template_the_second_question_continues_the_first_and_computes_only_its_new_tokens(model):
    talk, tokenizer = session(model, template=TEMPLATE), model[1]
    first = "".join(talk.ask("12+13="))
    before = talk.sampler.health()["prefill_tokens"]
    second = "".join(talk.ask("21+34="))
    tokens = tokenizer.encode(f"12+13={first}<eos>21+34=")
    assert second == tokenizer.decode(greedy(model, tokens), skip_special_tokens=True)
    assert talk.sampler.health()["prefill_tokens"] - before < len(tokens)
    talk.reset()
    assert "".join(talk.ask("12+13=")) == first


def test_an_answer_ends_at_its_limit_and_a_full_context_is_an_error_that_says_reset(model):
    assert len("".join(session(model, most=3).ask("184+768="))) == 3
    with pytest.raises(Exception, match="/reset"):
        list(session(model, context=8).ask("184+768="))


def test_a_pipe_gets_the_answers_alone_and_control_characters_are_escaped(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("12+13=\n\n/reset\n21+34=\n/quit\n99+99=\n"))
    assert cli.main(["chat", "embedded:tiny", "threads=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(">")[2] for line in lines] == ["25", "55"]
    monkeypatch.setattr(ChatSession, "ask", lambda self, text: iter(["\x1b[31m", "red"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    assert cli.main(["chat", "embedded:tiny", "threads=1"]) == 0
    assert capsys.readouterr().out == "\\x1b[31mred\n"


def test_nothing_to_talk_to_is_an_error_that_names_what_there_is(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chat"]) == 2
    assert "embedded:tiny" in capsys.readouterr().err
    assert cli.main(["chat", "runs/none"]) == 2
    assert "not a run directory" in capsys.readouterr().err
