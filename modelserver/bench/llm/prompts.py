"""Prompts: made of words, or read from a file; and the requests that carry them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.bench.llm.options import Length, LlmOptions, PromptOptions
from modelserver.bench.work import EndpointType
from modelserver.client.heads import HttpRequestHead
from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError

# Common words, of which most tokenizers make one token each.
_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new
sound take only little work know place year live me back give most very after thing our just name good sentence
man think say great where help through much before line right too mean old any same tell boy follow came want
show also around form three small set put end does another well large must big even such because turn here why
ask went men read need land different home us move try kind hand picture again change off play spell air away
"""
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text, or the messages of a chat; `max_tokens` None leaves the length of the answer to the model."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None


def make_prompts(options: PromptOptions) -> list[Prompt]:
    """Raises InvalidArgumentError for a file that cannot be used."""
    source = random.Random(options.seed)  # noqa: S311  (text, not secrets)
    if options.file is not None:
        return _from_file(options.file, options, source)
    return [
        Prompt(" ".join(source.choices(WORDS, k=_draw(options.input_tokens, source))), (), _output(options, source))
        for _ in range(options.num_prompts)
    ]


def _draw(length: Length, source: random.Random) -> int:
    return max(1, round(source.gauss(length.mean, length.deviation)))


def _output(options: PromptOptions, source: random.Random) -> int | None:
    return None if options.output_tokens is None else _draw(options.output_tokens, source)


def _from_file(path: Path, options: PromptOptions, source: random.Random) -> list[Prompt]:
    """A JSON object on each line: `prompt` (or `text_input`, `text`) or `messages`, and perhaps `max_tokens`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidArgumentError(f"--prompt-file: cannot read '{path}': {error.strerror}") from None
    prompts = [
        _from_line(line, f"{path}, line {number}", options, source)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise InvalidArgumentError(f"--prompt-file: '{path}' has no prompts")
    return prompts


def _from_line(line: bytes, where: str, options: PromptOptions, source: random.Random) -> Prompt:
    try:
        document = parse_json(line, where)
    except ValueError as error:
        raise InvalidArgumentError(f"{where}: not JSON: {error}") from None
    document = {"prompt": document} if isinstance(document, str) else document
    if not isinstance(document, dict):
        document = {}
    text = next((document[name] for name in ("prompt", "text_input", "text") if name in document), None)
    messages = document.get("messages", [])
    has_messages = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not has_messages or not (isinstance(text, str) or (text is None and messages)):
        raise InvalidArgumentError(f'{where}: expected {{"prompt": "..."}} or {{"messages": [{{"role": ...}}, ...]}}')
    if text is None:
        text = "\n".join(str(message.get("content", "")) for message in messages)
    max_tokens = document.get("max_tokens", document.get("output_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise InvalidArgumentError(f"{where}: 'max_tokens' must be a whole number of at least 1, got {max_tokens!r}")
    return Prompt(text, tuple(messages), max_tokens or _output(options, source))


def encode_prompts(options: LlmOptions, prompts: list[Prompt], path: str) -> tuple[bytes, ...]:
    """Complete HTTP requests."""
    head = HttpRequestHead(options.address, "POST", path, {"Accept": "text/event-stream", **options.headers})
    encoded = []
    for prompt in prompts:
        body = json.dumps(_body(options, prompt)).encode()
        encoded.append(head.encode(len(body)) + body)
    return tuple(encoded)


def _body(options: LlmOptions, prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if options.endpoint_type is EndpointType.GENERATE:
        body["text_input"] = prompt.text
        body["stream"] = options.is_streaming
    else:
        body["model"] = options.model
        if options.endpoint_type is EndpointType.CHAT:
            body["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        body["stream"] = options.is_streaming
        if options.is_streaming:
            body["stream_options"] = {"include_usage": True}
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    return body | dict(options.extra)
