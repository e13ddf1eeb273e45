"""`modelserver chat`: a conversation with a language model of a running server, in the terminal."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.output import Url, print_error, print_line
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.errors import InvalidArgumentError, ServerError

_PROMPT = ">>> "
# Members of a request that are not for its author.
_FIXED = ("model", "messages", "stream", "stream_options")
_NO_TEXT = "the message is not UTF-8 text"
# Control characters that a terminal would interpret, except line ends and tabs.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_HELP = """\
/image FILE       send a picture with the next message
/clear            begin a new conversation
/set              show what is set; /set NAME VALUE sets it: system, or a parameter of
                  OpenAI's API such as temperature, max_tokens, top_p, seed, stop
/unset NAME       use the model's own value again
/save FILE        write the conversation to a file, as JSON
/load FILE        go on with a conversation from a file
/bye              leave, as Ctrl-D does
Ctrl-C stops an answer."""


Images = Annotated[
    list[Path] | None, typer.Option("--image", help="Picture to send with the first message. Repeat for several.")
]


def chat(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    message: Annotated[str | None, typer.Argument(help="Ask this and exit after the answer.")] = None,
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always picks the most likely token.")] = None,
    image: Images = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a language model. Without a terminal, all of standard input is one message."""
    parameters: dict[str, object] = {"model": model}
    if max_tokens is not None:
        parameters["max_tokens"] = max_tokens
    if temperature is not None:
        parameters["temperature"] = temperature
    conversation = Conversation(ServerClient(url), parameters, system)
    try:
        for path in image or ():
            conversation.attach(path)
    except OSError as error:
        raise InvalidArgumentError(f"{error.filename}: {error.strerror}") from None
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
        # Parts of the next message.
        self._pictures: list[dict[str, Any]] = []
        # Tokens of the last answer, as the server counts them; None if it did not say.
        self.num_tokens: int | None = None
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def attach(self, path: Path) -> None:
        """Send a picture with the next message. Raises OSError."""
        data = base64.b64encode(path.read_bytes()).decode()
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        self._pictures.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})

    def settings(self) -> dict[str, object]:
        """What goes with each request, by name."""
        return {**self._parameters, **({"system": self._system} if self._system else {})}

    def set(self, name: str, value: object) -> None:
        """Set a parameter of the next requests, or the system message; None unsets it.

        Raises InvalidArgumentError for what the conversation itself is made of.
        """
        if name in _FIXED:
            raise InvalidArgumentError(f"'{name}' cannot be set here")
        if name == "system":
            self._system = str(value or "")
            rest = [message for message in self.messages if message["role"] != "system"]
            self.clear()
            self.messages += rest
        elif value is None:
            self._parameters.pop(name, None)
        else:
            self._parameters[name] = value

    def save(self, path: Path) -> None:
        """Write the conversation, with what is set. Raises OSError."""
        document = {"settings": self.settings(), "messages": self.messages}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def load(self, path: Path) -> None:
        """Go on with a conversation that was saved; the model stays. Raises OSError, and InvalidArgumentError."""
        try:
            document = json.loads(path.read_text())
            settings, messages = dict(document["settings"]), list(document["messages"])
        except (ValueError, KeyError, TypeError):
            raise InvalidArgumentError(f"{path} is not a conversation that /save has written") from None
        model = self._parameters["model"]
        self._system = str(settings.pop("system", ""))
        self._parameters = {**settings, "model": model}
        self.messages = messages

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
        pictures, self._pictures = self._pictures, []
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        self.messages.append({"role": "user", "content": content})
        answer: list[str] = []
        self.num_tokens = None
        try:
            options = {"stream_options": {"include_usage": True}}
            for chunk in self._client.chat({**self._parameters, **options, "messages": self.messages}):
                if usage := chunk.get("usage"):
                    self.num_tokens = usage.get("completion_tokens")
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
        if text.startswith("/"):
            try:
                _obey(conversation, *text.split(maxsplit=2))
            except OSError as error:
                print_error(f"{error.filename}: {error.strerror}")
            except InvalidArgumentError as error:
                print_error(error.message)
        elif text:
            try:
                _print_answer(conversation, text)
            except InvalidArgumentError as error:
                is_begun = any(message["role"] == "assistant" for message in conversation.messages)
                hint = "; /clear begins a new conversation, if this one is too long" if is_begun else ""
                print_error(error.message + hint)
            except ServerError as error:
                print_error(error.message)


def _obey(conversation: Conversation, command: str, name: str = "", value: str = "") -> None:
    """A command that is typed in place of a message."""
    if command == "/clear":
        conversation.clear()
    elif command == "/image" and name:
        conversation.attach(Path(f"{name} {value}".strip()).expanduser())
    elif command == "/set" and not name:
        for key, setting in conversation.settings().items():
            print_line(f"{key} = {setting}")
    elif command == "/set" and value:
        conversation.set(name, _setting(name, value))
    elif command == "/unset" and name:
        conversation.set(name, None)
    elif command in ("/save", "/load") and name:
        path = Path(f"{name} {value}".strip()).expanduser()
        if command == "/save":
            conversation.save(path)
        else:
            conversation.load(path)
        print_line(f"{len(conversation.messages)} messages: {path}")
    else:
        print_line(_HELP)


def _setting(name: str, text: str) -> object:
    """A number or another value of JSON as such, and any other text as text."""
    if name == "system":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_input() -> str:
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise InvalidArgumentError(_NO_TEXT) from None


def _print_answer(conversation: Conversation, text: str) -> None:
    """Print the pieces as they come; Ctrl-C stops the answer, and with it the request."""
    screen = _Screen(is_terminal=sys.stdout.isatty())
    began_s = time.monotonic()
    first_s = 0.0
    pieces = conversation.ask(text, screen.show_reasoning)
    try:
        for piece in pieces:
            first_s = first_s or time.monotonic()
            screen.show(piece)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        pieces.close()  # lets go of the connection
        screen.end()
        if screen.is_begun or sys.stdin.isatty():
            print_line("")
    if conversation.num_tokens and first_s:
        screen.show_speed(conversation.num_tokens, first_s - began_s, time.monotonic() - first_s)


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

    def show_speed(self, num_tokens: int, wait_s: float, answer_s: float) -> None:
        """On terminals, below the answer."""
        if self._is_terminal:
            rate = f", {(num_tokens - 1) / answer_s:.1f} tokens/s" if num_tokens > 1 and answer_s else ""
            print_line(f"\x1b[2m{num_tokens} tokens, first after {wait_s:.2f} s{rate}\x1b[22m")

    def end(self) -> None:
        """No more is pale."""
        if self._is_pale:
            sys.stdout.write("\x1b[22m")
            self._is_pale = False

    def _write(self, text: str) -> None:
        self.is_begun = True
        sys.stdout.write(text.translate(_CONTROLS) if self._is_terminal else text)
        sys.stdout.flush()
