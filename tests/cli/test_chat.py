"""Conversations in the terminal, and without one."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.mock_llm import write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.cli.chat import Conversation, _print_answer
from modelserver.cli.main import main
from modelserver.client.server_client import ServerClient
from modelserver.errors import ServerError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("chat")
    write_mock_llm(root, "mock")
    with running_server(root) as running:
        yield running


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(served: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `modelserver chat mock`: with `lines` typed at a terminal (or interrupts), else with `piped` input."""

    def command(
        *arguments: str,
        lines: list[str | BaseException | type[BaseException]] | None = None,
        piped: str = "",
        status: int = 0,
    ) -> tuple[str, str]:
        typed = iter(lines or [])

        def read_line(prompt: str = "") -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        stdin = io.StringIO(piped)
        monkeypatch.setattr(stdin, "isatty", lambda: lines is not None)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(builtins, "input", read_line)
        with pytest.raises(SystemExit) as ended:
            main(["chat", "mock", f"--url=http://{served.http_url}", *arguments])
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured
        return captured.out, captured.err

    return command


def script(**steps: object) -> str:
    return f"do: {json.dumps(steps)}"


def test_a_message_on_the_command_line_is_answered(run: Run) -> None:
    assert run("hello there") == ("hello there\n", "")


def test_standard_input_is_the_message(run: Run) -> None:
    assert run(piped="what it\nsays\n") == ("what it\nsays\n", "")
    assert "there is no message" in run(piped=" \n", status=1)[1]


def test_parameters_reach_the_model(run: Run) -> None:
    said, _ = run("--max-tokens=400", "--temperature=0", "--system=Be brief.", script(report=True))
    document = json.loads(said)
    assert json.loads(document["messages"])["messages"][0] == {"role": "system", "content": "Be brief."}
    parameters = document["sampling_parameters"]
    assert (parameters["max_tokens"], parameters["temperature"]) == (400, 0)


def test_a_conversation_at_a_terminal(run: Run) -> None:
    out, err = run(lines=["one", "", KeyboardInterrupt, "/help", "/clear", "two", "/bye", "three"])
    assert "one\n" in out
    assert "two\n" in out
    assert "three" not in out
    assert "/clear" in out
    assert err == ""


def test_settings_and_saved_conversations(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    lines = ["/set temperature 0.5", "/set seed 7", "/unset seed", "/set system Be brief.", "one", f"/save {path}"]
    out, err = run(lines=[*lines, "/set", "/set model other", "/set stop", f"/load {tmp_path}/none", "/bye"])
    assert "temperature = 0.5\nsystem = Be brief.\n" in out
    assert "seed" not in out.partition("temperature")[2].partition("/clear")[0]
    assert "'model' cannot be set here" in err
    assert "none: No such file" in err
    document = json.loads(path.read_text())
    assert [message["content"] for message in document["messages"]] == ["Be brief.", "one", "one"]
    out, err = run(lines=[f"/load {path}", script(report=True), f"/load {__file__}"])
    report = json.loads(out.partition("{")[1] + out.partition("{")[2].splitlines()[0])
    assert json.loads(report["messages"])["messages"][:3] == document["messages"]
    assert report["sampling_parameters"]["temperature"] == 0.5
    assert "is not a conversation that /save has written" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "the model 'nobody' does not exist"),
        (["mock", "--url=http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
    ],
)
def test_what_answers_nothing_is_told_before_the_first_question(
    served: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments, message: str
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda _: pytest.fail("a question is asked for"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", f"--url=http://{served.http_url}", *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err


def test_what_is_no_text_is_told(run: Run) -> None:
    assert "the message is not UTF-8 text" in run("a\udcff", status=1)[1]
    out, err = run(lines=["a\udcff", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "and on"])
    assert err.count("the message is not UTF-8 text") == 2
    assert "and on\n" in out


def test_a_conversation_that_is_too_long_can_be_begun_anew(run: Run) -> None:
    _, err = run(lines=[script(refuse="the first"), "one", script(refuse="too much")])
    first, second = err.splitlines()
    assert first.endswith("the first")
    assert second.endswith("too much; /clear begins a new conversation, if this one is too long")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_reasoning_is_pale_and_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """And a model moves no cursor there."""
    deltas = [
        {"role": "assistant"},
        {"reasoning": "well"},
        {"reasoning": " now"},
        {"content": "so\x1b[2J"},
        {"content": "!\n"},
    ]
    said = SimpleNamespace(chat=lambda _: ({"choices": [{"delta": delta}]} for delta in deltas))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _print_answer(Conversation(cast("ServerClient", said), {"model": "m"}), "?")
    shown = "\x1b[2mwell now\x1b[22m\n\nso[2J!\n\n" if is_terminal else "so\x1b[2J!\n\n"
    assert capsys.readouterr().out == shown


def test_an_error_does_not_end_the_conversation(run: Run) -> None:
    out, err = run(lines=[script(error=0), "and on"])
    assert err.startswith("error: ")
    assert "and on\n" in out


def test_an_interrupt_stops_the_answer_and_the_request(
    run: Run, served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = sys.stdout.write, []

    def interrupt(text: str) -> int:
        written.append(text)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    out, _ = run(lines=[script(text="on and on ", endless=True), "another"])
    assert out.endswith("another\n\n")
    model = served.server.repository.get("mock", None)
    until_true(lambda: served.call(lambda: model.inflight) == 0, "the request was cancelled")


def test_a_conversation_remembers_what_was_said(served: RunningServer) -> None:
    conversation = Conversation(ServerClient(f"http://{served.http_url}"), {"model": "mock"}, "Be brief.")
    assert "".join(conversation.ask("first")) == "first"
    pieces = conversation.ask(script(text="on and on ", endless=True))
    next(pieces)
    pieces.close()
    with pytest.raises(ServerError):
        "".join(conversation.ask(script(error=0)))
    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(("model", "message"), [("nobody", "nobody"), ("mok", "mock")])
def test_an_unknown_model_is_named(served: RunningServer, model: str, message: str) -> None:
    conversation = Conversation(ServerClient(f"http://{served.http_url}"), {"model": model})
    with pytest.raises(ServerError, match=message):
        "".join(conversation.ask("x"))


def test_pictures_go_with_the_first_message(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "a picture.png"
    picture.write_bytes(b"\x89PNG")
    assert "takes text only, and no pictures" in run(f"--image={picture}", "what is it", status=1)[1]
    assert "No such file" in run(f"--image={tmp_path / 'none.png'}", "what is it", status=1)[1]
    _, err = run(lines=[f"/image {picture}", "what is it", "/image none.png", "/bye"])
    assert "takes text only, and no pictures" in err
    assert "none.png: No such file" in err
