"""From a `GenerateCall` to an answer: what every API of language models does between its reader and its writer.

reader (of the API) -> GenerateCall -> prepare -> answer -> EventWriter (of the API) -> frames, or one document
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RowResponse
from modelserver.errors import InternalError
from modelserver.frontends.http.framing import Frames, PreparedFrame
from modelserver.frontends.llm.call import GenerateCall, Prompt, common_inputs
from modelserver.frontends.llm.choices import Choice, Usage
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import Fault, ParameterError, UnknownToolFormatError
from modelserver.frontends.llm.events import Event
from modelserver.frontends.llm.harmony import HarmonyReader
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.pictures import IMAGE, sources_of
from modelserver.frontends.llm.prompts import conversation_input, token_ids_of
from modelserver.frontends.llm.reasoning import HARMONY, REASONING_FORMATS, ReasoningFormat, ReasoningReader
from modelserver.frontends.llm.requests import Listener, Requests
from modelserver.frontends.llm.token_deltas import read_deltas
from modelserver.frontends.llm.tool_constrained import NamedToolReader, RequiredToolReader
from modelserver.frontends.llm.tool_formats import HARMONY_CALLS, TOOL_FORMATS, ToolFormat
from modelserver.frontends.llm.tool_text import ToolTextReader
from modelserver.frontends.llm.tools import ToolReader, ToolUse
from modelserver.planes.authorized import AnyDataPlane

# What a response says of each choice that it has news of. A choice may have no events, as with half a character.
News = list[tuple[Choice, list[Event]]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that can be sent: a request for each prompt, and the choices of each. `usage` counts while it runs."""

    call: GenerateCall
    model: LanguageModel
    requests: list[InFlightRequest]
    choices: list[list[Choice]]
    reasoning: ReasoningFormat | None
    usage: Usage


class EventWriter(abc.ABC):
    """Writes the answer to one call in the documents of an API.

    `num_echoed` is about how many bytes of the request the whole answer repeats.
    """

    num_echoed = 0

    def text_frame(self, choice: Choice) -> PreparedFrame | None:  # noqa: ARG002
        """The frame of a token of this choice that adds nothing but its text; None where `frames` writes all tokens."""
        return None

    @abc.abstractmethod
    def frames(self, news: News) -> Frames:
        """What a response adds to a stream, framed; empty while there is nothing to write."""

    @abc.abstractmethod
    def last_frames(self) -> Frames:
        """What a stream has after all choices, before its end."""

    @abc.abstractmethod
    def note(self, news: News) -> None:
        """Keep what a response says for `document`."""

    @abc.abstractmethod
    def document(self) -> Mapping[str, Any] | list[Any]:
        """The whole answer."""


async def prepare(dataplane: AnyDataPlane, model: LanguageModel, asked: GenerateCall, call: Call) -> Prepared:
    """Make the requests of a call. Raises ServerError for what the model does not have or take."""
    if asked.suffix and "suffix" not in model.inputs:
        asked = await filled(dataplane, model, asked)
    tool_format, reasoning = _tool_format(model, asked), _reasoning_format(model, asked)
    needed, wanted = common_inputs(_with_marks(asked, tool_format, reasoning), model.inputs)
    if reasoning is not None and asked.is_counted:
        wanted["return_token_ids"] = True
    if asked.adds_special_tokens is not None:
        needed["add_special_tokens"] = asked.adds_special_tokens
    prompts: list[dict[str, Any]]
    if asked.conversation is not None:
        prompts = [await conversation_input(dataplane, model, asked.conversation, call.picture_urls)]
        if asked.adds_special_tokens is None and "text_input" in prompts[0]:
            # The template has written them.
            wanted["add_special_tokens"] = False
    else:
        prompts = [prompt_input(prompt) for prompt in asked.prompts]
        for prompt, pictures in zip(prompts, asked.pictures, strict=False):
            if pictures:
                prompt[IMAGE] = await sources_of(model, pictures, call.picture_urls)
    return Prepared(
        asked,
        model,
        [call.adopt(request) for request in await model.requests([needed | prompt for prompt in prompts], wanted)],
        [
            [
                _choice(asked, prompt, prompt * asked.num_choices + number, tool_format, reasoning)
                for number in range(asked.num_choices)
            ]
            for prompt in range(len(prompts))
        ],
        reasoning,
        Usage(),
    )


def prompt_input(prompt: Prompt) -> dict[str, Any]:
    """The input tensor that has a prompt."""
    return {"text_input" if isinstance(prompt, str) else "input_ids": prompt}


async def answer(dataplane: AnyDataPlane, prepared: Prepared, call: Call, writer: EventWriter) -> None:
    """Send the requests, and write what comes of them to the client. Raises ServerError.

    Errors before the first frame leave the answer to the caller, later ones too: `Call.fail` knows both.
    """
    is_streamed = prepared.call.is_streamed
    listener = _Streamed(prepared, writer, call) if is_streamed else WholeListener(prepared, writer)
    with Requests(dataplane, prepared.requests, listener) as requests:
        await requests.run()
    await count_reasoning(dataplane, prepared)
    if is_streamed:
        await call.finish(writer.last_frames())
    else:
        await call.answer_beside(writer.document(), writer.num_echoed)


class WholeListener(Listener):
    """Has the writer keep what responses say."""

    def __init__(self, prepared: Prepared, writer: EventWriter) -> None:
        self._choices = prepared.choices
        self._usage = prepared.usage
        self._writer = writer

    def hear(self, prompt: int, response: InferResponse) -> bool:
        self._writer.note(self._news(prompt, response))
        return True

    def _news(self, prompt: int, response: InferResponse) -> News:
        choices = self._choices[prompt]
        deltas = read_deltas(response)
        if len(deltas) == 1 and not response.is_final and 0 <= deltas[0].choice < len(choices):
            # The usual case, and the one that comes for every token.
            choice = choices[deltas[0].choice]
            self._usage.take(prompt, deltas[0])
            return [(choice, choice.take(deltas[0]))]
        found: dict[Choice, list[Event]] = {}
        for delta in deltas:
            if 0 <= delta.choice < len(choices):
                choice = choices[delta.choice]
                self._usage.take(prompt, delta)
                found.setdefault(choice, []).extend(choice.take(delta))
        if response.is_final:
            # Of a model that does not say why it ended.
            for choice in choices:
                if not choice.is_finished:
                    found.setdefault(choice, []).extend(choice.finish("stop"))
        return list(found.items())


class _Streamed(WholeListener):
    """Sends what the writer makes of responses."""

    def __init__(self, prepared: Prepared, writer: EventWriter, call: Call) -> None:
        super().__init__(prepared, writer)
        self._call = call

    def hear(self, prompt: int, response: InferResponse) -> bool:
        frames: Frames = b""
        if type(response) is RowResponse and not response.is_final:
            frames = self._text_frame(prompt, response.values)
        frames = frames or self._writer.frames(self._news(prompt, response))
        return not frames or self._call.send(frames)

    def _text_frame(self, prompt: int, values: Mapping[str, Any]) -> bytes:
        """The usual token of a stream, which adds nothing but its text; empty for any other, which is not taken."""
        choices, number = self._choices[prompt], values.get("index", 0)
        if not 0 <= number < len(choices):
            return b""
        choice = choices[number]
        frame = self._writer.text_frame(choice)
        text = "" if frame is None else choice.take_text(values)
        if frame is None or not text:
            return b""
        self._usage.num_output_tokens += values["num_output_tokens"]
        return frame.with_text(text)

    async def wait_for_room(self) -> None:
        await self._call.wait_for_room()


async def count_reasoning(dataplane: AnyDataPlane, prepared: Prepared) -> None:
    """Note how many tokens the reasoning is, where it is asked for and the model can say it: those between the tokens
    of its tags, or, where they are not to be found, those of its text.
    """
    model, tags = prepared.model, prepared.reasoning
    if tags is None or not prepared.call.is_counted or "operation" not in model.inputs:
        return
    choices = [choice for each in prepared.choices for choice in each]
    ends = [{"text_input": text} for text in (tags.start, tags.end)]
    start, end = await token_ids_of(dataplane, model, ends, adds_special_tokens=False)
    counts = [choice.count_reasoning(start, end) for choice in choices]
    pairs = zip(choices, counts, strict=True)
    texts = [choice.reasoning for choice, count in pairs if count is None and choice.reasoning]
    ids = await token_ids_of(dataplane, model, [{"text_input": text} for text in texts], adds_special_tokens=False)
    prepared.usage.num_reasoning_tokens = sum(count or 0 for count in counts) + sum(map(len, ids))


def _choice(
    asked: GenerateCall, prompt: int, number: int, tool_format: ToolFormat | None, reasoning: ReasoningFormat | None
) -> Choice:
    return Choice(
        prompt,
        number,
        has_tokens=asked.num_logprobs is not None or asked.has_token_ids,
        reasoning=_reasoning_reader(asked, reasoning),
        tells_reasoning=asked.has_reasoning,
        tools=_tool_reader(asked, tool_format),
        echo=asked.echo,
    )


def _tool_reader(asked: GenerateCall, tool_format: ToolFormat | None) -> ToolReader | None:
    tools = asked.tools
    if tools.use is ToolUse.NAMED:
        return NamedToolReader(tools.name)
    if tools.use is ToolUse.REQUIRED:
        return RequiredToolReader()
    if tools.use is ToolUse.AUTO and tool_format is not None:
        return ToolTextReader(tool_format, tools.functions, is_parallel=tools.is_parallel)
    return None


def _reasoning_reader(asked: GenerateCall, tags: ReasoningFormat | None) -> ReasoningReader | HarmonyReader | None:
    if tags is None:
        return None
    if tags.has_channels:
        return HarmonyReader(has_calls=asked.tools.use is ToolUse.AUTO, is_parallel=asked.tools.is_parallel)
    # Constrained text has no room for reasoning, and begins with the answer.
    is_inside = tags.is_implicit and not asked.is_structured and not asked.is_thinking_disabled
    return ReasoningReader(tags, is_inside=is_inside)


def _tool_format(model: LanguageModel, asked: GenerateCall) -> ToolFormat | None:
    """How the model writes calls, unless in channels.

    Raises UnknownToolFormatError where its config does not say so.
    """
    if asked.tools.use is not ToolUse.AUTO or model.writes_harmony:
        return None
    if not model.tool_parser:
        raise UnknownToolFormatError(
            f"model '{model.name}' cannot be asked to choose tools: its config has no parameter tool_parser "
            f"(one of {', '.join(sorted([*TOOL_FORMATS, HARMONY_CALLS]))})"
        )
    found = TOOL_FORMATS.get(model.tool_parser)
    if found is None:
        raise _unknown_format(model, "tool_parser", model.tool_parser, TOOL_FORMATS)
    return found


def _reasoning_format(model: LanguageModel, asked: GenerateCall) -> ReasoningFormat | None:
    """The tags around the model's reasoning, which answers to conversations have."""
    name = HARMONY if model.writes_harmony else model.reasoning_parser
    if not name or asked.conversation is None:
        return None
    found = REASONING_FORMATS.get(name)
    if found is None:
        raise _unknown_format(model, "reasoning_parser", name, REASONING_FORMATS)
    return found


def _unknown_format(model: LanguageModel, parameter: str, name: str, known: Mapping[str, Any]) -> InternalError:
    return InternalError(
        f"model '{model.name}': the parameter {parameter} of its config is '{name:.40}', "
        f"expected one of {', '.join(sorted(known))}"
    )


def _with_marks(asked: GenerateCall, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> GenerateCall:
    """Ask for the tokens that mark calls and reasoning, where they would be left out of the text."""
    has_marks = (tools is not None and tools.has_special_tokens) or (
        reasoning is not None and reasoning.has_special_tokens
    )
    if not has_marks:
        return asked
    return replace(asked, sampling={**asked.sampling, "skip_special_tokens": False})


# How the model families write "before", "after" and "middle" of a text that is to be filled in.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's own characters
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Tokens that end a filling and that not every model has as its end of text: of Qwen, StarCoder, Granite, CodeLlama and
# CodeGemma.
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
)


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The ids of a model's marks. `ends` are the tokens that end a filling, `start` those that begin every text."""

    before: int
    after: int
    middle: int
    ends: tuple[int, ...]
    start: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int], files: Sequence[int] = ()) -> list[int]:
        """`files` are texts beside the one with the gap."""
        return [*self.start, *files, self.before, *before, self.after, *after, self.middle]


def no_marks(model: LanguageModel) -> str:
    """The error for a model whose tokenizer has no marks."""
    return (
        f"model '{model.name}' does not fill in the middle: its tokenizer has no tokens for it, such as "
        f"{' '.join(_MARKS[0])}"
    )


async def fill_marks(dataplane: AnyDataPlane, model: LanguageModel) -> FillMarks | None:
    """The marks that the model's tokenizer has as single tokens; None if it has none. Raises ServerError."""

    async def ids_of(texts: Sequence[str]) -> list[list[int]]:
        prompts = [{"text_input": text} for text in texts]
        return await token_ids_of(dataplane, model, prompts, adds_special_tokens=False)

    firsts = await ids_of([marks[0] for marks in _MARKS])
    for marks, first in zip(_MARKS, firsts, strict=True):
        if len(first) != 1:
            continue
        after, middle, *ends = await ids_of([*marks[1:], *_ENDS])
        if len(after) == len(middle) == 1:
            (start,) = await token_ids_of(dataplane, model, [{"text_input": ""}], adds_special_tokens=True)
            single = [each[0] for each in ends if len(each) == 1]
            return FillMarks(first[0], after[0], middle[0], tuple(single), tuple(start))
    return None


async def filled(dataplane: AnyDataPlane, model: LanguageModel, asked: GenerateCall) -> GenerateCall:
    """The call with prompts in which the suffix stands, and without it.

    Raises ParameterError for a model that has no tokens for it.
    """
    marks = await fill_marks(dataplane, model) if "operation" in model.inputs else None
    if marks is None:
        raise ParameterError(f"'suffix' is not supported: {no_marks(model)}", "suffix", Fault.UNSUPPORTED_PARAMETER)
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    prompts = [{"text_input": text} for text in (asked.suffix, *texts)]
    if asked.adds_special_tokens is False:
        marks = replace(marks, start=())
    after, *found = await token_ids_of(dataplane, model, prompts, adds_special_tokens=False)
    ids = iter(found)
    filled_in: list[Prompt] = [
        marks.prompt(next(ids) if isinstance(prompt, str) else prompt, after) for prompt in asked.prompts
    ]
    sampling = asked.sampling
    if marks.ends and "sampling_parameters" in model.inputs:
        sampling = {**sampling, "stop_token_ids": [*sampling.get("stop_token_ids", ()), *marks.ends]}
    return replace(asked, prompts=tuple(filled_in), suffix="", sampling=sampling)
