"""`modelserver chat`: a conversation with a language model of a running server, in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Annotated, Any

import typer

from modelserver.cli.output import Url, print_error, print_line
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import InvalidArgumentError, ServerError

_PROMPT = ">>> "
_NO_TEXT = "the message is not UTF-8 text"
# Control characters that a terminal would interpret, except line ends and tabs.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_HELP = """\
/clear   begin a new conversation
/bye     leave, as Ctrl-D does
Ctrl-C stops an answer."""


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    message: Annotated[str | None, typer.Argument(help="Ask this and exit after the answer.")] = None,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always picks the most likely token.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a language model. Without a terminal, all of standard input is one message."""
    parameters: dict[str, object] = {"model": model}
    if max_tokens is not None:
        parameters["max_tokens"] = max_tokens
    if temperature is not None:
        parameters["temperature"] = temperature
    conversation = Conversation(ServerClient(url), parameters, system)
    if message is None and sys.stdin.isatty():
        _talk(conversation)
        return
    text = _read_input() if message is None else message
    if not text:
        raise InvalidArgumentError("there is no message: standard input is empty")
    _print_answer(conversation, text)


class Conversation:
    """The messages so far. `parameters` go with each request."""

    def __init__(self, client: ServerClient, parameters: dict[str, object], system: str = "") -> None:
        self._client = client
        self._parameters = parameters
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def check_model(self) -> None:
        """Check access: raises ServerError without a server, for an unknown model, or if the key may not use it."""
        self._client.language_model(str(self._parameters["model"]))

    def ask(self, text: str, show_reasoning: Callable[[str], None] = lambda _: None) -> Generator[str, None, None]:
        """The answer in pieces. A partial answer (after a failure or a stop) is kept in the conversation.

        `show_reasoning` gets the pieces of the model's reasoning if the server separates them.
        Raises ServerError; a question without any answer is removed from the conversation.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(_NO_TEXT) from None
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for chunk in self._client.chat({**self._parameters, "messages": self.messages}):
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("reasoning"):
                        show_reasoning(delta["reasoning"])
                    piece = delta.get("content")
                    if piece:
                        answer.append(piece)
                        yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def _talk(conversation: Conversation) -> None:
    """Questions from the terminal, until end of input."""
    with contextlib.suppress(ImportError):  # enables line editing if readline is available
        import readline  # noqa: F401
    conversation.check_model()
    print_line("/help lists the commands; Ctrl-D exits.")
    while True:
        try:
            text = input(_PROMPT).strip()
        except KeyboardInterrupt:
            print_line("")
            continue
        except EOFError:
            print_line("")
            return
        except UnicodeDecodeError:
            print_error(_NO_TEXT)
            continue
        if text in ("/bye", "/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
        elif text.startswith("/"):
            print_line(_HELP)
        elif text:
            try:
                _print_answer(conversation, text)
            except InvalidArgumentError as error:
                is_begun = any(message["role"] == "assistant" for message in conversation.messages)
                hint = "; /clear begins a new conversation, if this one is too long" if is_begun else ""
                print_error(error.message + hint)
            except ServerError as error:
                print_error(error.message)


def _read_input() -> str:
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise InvalidArgumentError(_NO_TEXT) from None


def _print_answer(conversation: Conversation, text: str) -> None:
    """Print the pieces as they come; Ctrl-C stops the answer, and with it the request."""
    screen = _Screen(is_terminal=sys.stdout.isatty())
    pieces = conversation.ask(text, screen.show_reasoning)
    try:
        for piece in pieces:
            screen.show(piece)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        pieces.close()  # lets go of the connection
        screen.end()
        if screen.is_begun or sys.stdin.isatty():
            print_line("")


class _Screen:
    """Prints an answer. Reasoning is dimmed and shown on terminals only; programs get the answer alone."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_begun = False
        self._is_terminal = is_terminal
        self._is_pale = False

    def show(self, text: str) -> None:
        if self._is_pale:
            self.end()
            sys.stdout.write("\n\n")
        self._write(text)

    def show_reasoning(self, text: str) -> None:
        if self._is_terminal:
            if not self._is_pale:
                sys.stdout.write("\x1b[2m")
                self._is_pale = True
            self._write(text)

    def end(self) -> None:
        """No more is pale."""
        if self._is_pale:
            sys.stdout.write("\x1b[22m")
            self._is_pale = False

    def _write(self, text: str) -> None:
        self.is_begun = True
        sys.stdout.write(text.translate(_CONTROLS) if self._is_terminal else text)
        sys.stdout.flush()
