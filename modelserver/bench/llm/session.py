"""A run of prompts from its options to its results."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

from modelserver.bench.fleet import Fleet, Harvest
from modelserver.bench.llm.options import DEFAULT_PATHS, Length, LlmOptions, PromptOptions
from modelserver.bench.llm.results import Call, LlmLevel, LlmResults, level_figures, unpack_calls
from modelserver.bench.options import Mode
from modelserver.bench.profiler import OPEN_START_NS, search_levels
from modelserver.bench.session import count_workers
from modelserver.bench.window import Nanoseconds
from modelserver.bench.work import ClosedLoad, EndpointType, LlmWork, OpenLoad
from modelserver.client.heads import HttpRequestHead, model_path
from modelserver.core.documents import parse_json
from modelserver.errors import InvalidArgumentError, UnavailableError

POLL_S = 0.1
# Without an event of any request for this long, the server has stopped answering.
STALLED_S = 120.0
REQUESTS_PER_LANE = 4
MIN_REQUESTS = 20


class LlmWatcher:
    """Receives the progress of a run."""

    def level_began(self, value: float) -> None:
        """A level of the load begins."""

    def progressed(self, num_done: int, num_requests: int) -> None:
        """So far, in the present level."""

    def level_ended(self, level: LlmLevel) -> None:
        """A level is measured."""


async def run_llm(options: LlmOptions, watcher: LlmWatcher) -> LlmResults:
    """Measure. Raises ServerError for what keeps the run from starting."""
    path = (
        options.path or DEFAULT_PATHS.get(options.endpoint_type) or model_path(options.model, "") + "/generate_stream"
    )
    requests = encode_prompts(options, make_prompts(options.prompts), path)
    work = LlmWork(options.endpoint_type, options.address, requests, options.load.seed)
    num_workers = count_workers(options.load)
    results = LlmResults(options, num_workers)
    async with Fleet(num_workers) as fleet:
        await fleet.set_up(work)
        if options.num_warmup_requests:
            await _warm_up(options, fleet)
        search = search_levels(options.load)
        for value in search:
            watcher.level_began(value)
            level = await _measure(options, fleet, value, watcher)
            results.levels.append(level)
            watcher.level_ended(level)
            search.report(bool(level.figures.num_requests))
    return results


async def _warm_up(options: LlmOptions, fleet: Fleet) -> None:
    count = options.num_warmup_requests
    await fleet.begin(ClosedLoad(concurrency=min(count, int(options.load.levels.start) or 1), num_requests=count))
    harvest, calls = await _until_over(fleet, count, None)
    await fleet.end()
    if not calls:
        raise UnavailableError(f"no request of the warm-up succeeded: {next(iter(harvest.failures), 'no answer')}")


def count_requests(options: LlmOptions, value: float) -> int:
    """How many requests a level has."""
    if options.num_requests:
        return options.num_requests
    lanes = int(value) if options.load.mode is Mode.CONCURRENCY else 1
    return max(MIN_REQUESTS, REQUESTS_PER_LANE * lanes)


async def _measure(options: LlmOptions, fleet: Fleet, value: float, watcher: LlmWatcher) -> LlmLevel:
    count = count_requests(options, value)
    # Records from before belong to no level.
    await fleet.collect()
    if options.load.mode is Mode.CONCURRENCY:
        await fleet.begin(ClosedLoad(concurrency=min(int(value), count), num_requests=count))
    else:
        await fleet.begin(
            OpenLoad(
                rate=value,
                start_ns=monotonic_ns() + OPEN_START_NS,
                is_poisson=options.load.is_poisson,
                intervals_ns=options.load.intervals_ns,
                num_lanes=8 * fleet.num_workers,
                max_lanes=options.load.max_lanes,
                num_requests=count,
            )
        )
    harvest, calls = await _until_over(fleet, count, watcher)
    num_unanswered = await fleet.end()
    last = await fleet.collect()
    calls += [call for packed in last.calls for call in unpack_calls(packed)]
    return LlmLevel(
        value=value,
        figures=level_figures(calls, targets=options.goodput),
        failures=harvest.failures + last.failures,
        num_unanswered=num_unanswered,
        busiest=harvest.busiest,
        calls=calls,
    )


async def _until_over(fleet: Fleet, count: int, watcher: LlmWatcher | None) -> tuple[Harvest, list[Call]]:
    """Collect until all requests are answered, or events stop."""
    whole = Harvest()
    calls: list[Call] = []
    progress_ns = monotonic_ns()
    while True:
        harvest = await fleet.collect()
        whole.add(harvest)
        new = [call for packed in harvest.calls for call in unpack_calls(packed)]
        calls += new
        if watcher is not None:
            watcher.progressed(len(calls) + len(whole.failure_times), count)
        if harvest.is_over:
            return whole, calls
        if new or _any(harvest.failure_times):
            progress_ns = monotonic_ns()
        elif monotonic_ns() - progress_ns > STALLED_S * 1e9:
            return whole, calls
        await asyncio.sleep(POLL_S)


def _any(times: Nanoseconds) -> bool:
    return len(times) > 0


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
