"""`POST /v1/chat/completions`: one request to the model, which makes the prompt by its own template."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.edge import Call, event
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.generation import Generation
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.pieces import TokenLogprob, read_pieces
from modelserver.frontends.llm.reasoning import REASONING_FORMATS, ReasoningFormat
from modelserver.frontends.llm.template import conversation_input
from modelserver.frontends.llm.tool_formats import TOOL_FORMATS, ToolFormat
from modelserver.frontends.llm.tools import ToolUse
from modelserver.frontends.openai.chat_choice import ChatChoice
from modelserver.frontends.openai.chat_request import ChatRequest, read_chat
from modelserver.frontends.openai.frame import Frame
from modelserver.frontends.openai.generation_options import generation_inputs
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.logprobs import prompt_logprobs_document
from modelserver.frontends.openai.tokens import token_ids_of
from modelserver.frontends.openai.usage import Usage

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane


class Chat:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane, limits: OpenAiLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    async def serve(self, call: Call) -> None:
        """Answer `call`. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        chat = read_chat(call.fields, self._limits)
        tool_format, reasoning = _tool_format(model, chat), _reasoning_format(model)
        is_streamed = chat.options.is_streamed
        is_counted = not is_streamed or chat.options.has_usage
        marked = _with_marks(chat, tool_format, reasoning)
        prompt = await conversation_input(self._dataplane, model, chat.conversation)
        request = call.adopt(_request(model, marked, prompt, has_token_ids=reasoning is not None and is_counted))
        kind = "chat.completion.chunk" if is_streamed else "chat.completion"
        frame = Frame(call.make_id("chatcmpl-"), kind, call.created_s, model.name)
        prompt_token_ids = await self._prompt_token_ids(model, chat) if chat.options.has_token_ids else None
        answer = ChatAnswer(chat, frame, tool_format, reasoning, prompt_token_ids)
        with Generation(self._dataplane, [request]) as generation:
            async for arrivals in generation.arrivals():
                if is_streamed:
                    events = b"".join(event(chunk) for _, response in arrivals for chunk in answer.chunks(response))
                    if events:
                        await call.send(events)
                else:
                    for _, response in arrivals:
                        answer.take(response)
        if reasoning is not None and is_counted:
            await self._count_reasoning(model, reasoning, answer)
        if is_streamed:
            await call.send(b"".join(event(chunk) for chunk in answer.last_chunks()))
            await call.finish()
        else:
            call.answer(answer.document())

    async def _prompt_token_ids(self, model: LanguageModel, chat: ChatRequest) -> list[int]:
        prompt = await conversation_input(self._dataplane, model, chat.conversation)
        adds = chat.adds_special_tokens
        return (await token_ids_of(self._dataplane, model, [prompt], adds_special_tokens=adds))[0]

    async def _count_reasoning(self, model: LanguageModel, tags: ReasoningFormat, answer: ChatAnswer) -> None:
        """Note how many tokens the reasoning is, where the model can say it: those between the tokens of its tags, or,
        where they are not to be found, those of its text.
        """
        if "operation" not in model.inputs:
            return
        start, end = await self._tokens_of(model, [tags.start, tags.end])
        counts = answer.count_reasoning(start, end)
        texts = [text for text, count in zip(answer.reasoning_texts(), counts, strict=True) if text and count is None]
        ids = await self._tokens_of(model, texts)
        answer.usage.num_reasoning_tokens = sum(count or 0 for count in counts) + sum(map(len, ids))

    async def _tokens_of(self, model: LanguageModel, texts: list[str]) -> list[list[int]]:
        prompts = [{"text_input": text} for text in texts]
        return await token_ids_of(self._dataplane, model, prompts, adds_special_tokens=False)


def _request(model: LanguageModel, chat: ChatRequest, prompt: dict[str, Any], *, has_token_ids: bool) -> InferRequest:
    needed, wanted = generation_inputs(chat.options, model.inputs)
    needed |= prompt
    if chat.adds_special_tokens is not None:
        needed["add_special_tokens"] = chat.adds_special_tokens
    elif "text_input" in prompt:
        # The template has written them.
        wanted["add_special_tokens"] = False
    if has_token_ids:
        wanted["return_token_ids"] = True
    return model.request(needed, wanted)


def _tool_format(model: LanguageModel, chat: ChatRequest) -> ToolFormat | None:
    """How the model writes calls. Raises ParameterError when it may call tools and nobody knows how it does."""
    if chat.tools.use is not ToolUse.AUTO:
        return None
    if not model.tool_parser:
        raise ParameterError(
            f"model '{model.name}' cannot be asked to choose tools: its config has no parameter tool_parser "
            f"(one of {', '.join(sorted(TOOL_FORMATS))}); use tool_choice required, a named function, or none",
            "tool_choice",
            Fault.UNSUPPORTED_PARAMETER,
        )
    found = TOOL_FORMATS.get(model.tool_parser)
    if found is None:
        raise _unknown_format(model, "tool_parser", model.tool_parser, TOOL_FORMATS)
    return found


def _reasoning_format(model: LanguageModel) -> ReasoningFormat | None:
    name = model.reasoning_parser
    if not name:
        return None
    found = REASONING_FORMATS.get(name)
    if found is None:
        raise _unknown_format(model, "reasoning_parser", name, REASONING_FORMATS)
    return found


def _unknown_format(model: LanguageModel, parameter: str, name: str, known: dict[str, Any]) -> InternalError:
    return InternalError(
        f"model '{model.name}': the parameter {parameter} of its config is '{name:.40}', "
        f"expected one of {', '.join(sorted(known))}"
    )


def _with_marks(chat: ChatRequest, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> ChatRequest:
    """Ask for the tokens that mark calls and reasoning, where they would be left out of the text."""
    has_marks = (tools is not None and tools.has_special_tokens) or (
        reasoning is not None and reasoning.has_special_tokens
    )
    if not has_marks:
        return chat
    sampling = {**chat.options.sampling, "skip_special_tokens": False}
    return replace(chat, options=replace(chat.options, sampling=sampling))


class ChatAnswer:
    """All choices of a call, as their pieces come."""

    def __init__(
        self,
        chat: ChatRequest,
        frame: Frame,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        prompt_token_ids: list[int] | None,
    ) -> None:
        """`prompt_token_ids` are told at the beginning, if at all."""
        self._options = chat.options
        self._frame = frame
        self._prompt_token_ids = prompt_token_ids
        self.usage = Usage()
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._choices = [ChatChoice(chat, index, tool_format, reasoning) for index in range(chat.options.num_choices)]

    def take(self, response: InferResponse) -> list[ChatChoice]:
        """Note a response; the choices that it has news of."""
        touched = []
        for piece in read_pieces(response):
            if 0 <= piece.choice < len(self._choices):
                choice = self._choices[piece.choice]
                self.usage.take(0, piece)
                choice.take(piece)
                touched.append(choice)
                if piece.prompt_logprobs is not None:
                    self._prompt_logprobs = piece.prompt_logprobs
        if response.is_final:
            # Of a model that does not say why it ended.
            for choice in self._choices:
                if not choice.is_finished:
                    choice.finish("stop")
                    touched.append(choice)
        return list(dict.fromkeys(touched))

    def chunks(self, response: InferResponse) -> list[dict[str, Any]]:
        """What a response adds to a stream."""
        parts = [part for choice in self.take(response) for part in choice.chunks()]
        if self._options.has_usage:
            usage = self.usage.document() if self._options.has_continuous_usage else None
            found = [self._frame.around([part], usage) for part in parts]
        else:
            found = [self._frame.around_part(part) for part in parts]
        if found and self._prompt_token_ids is not None:
            found[0]["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return found

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream has after all choices."""
        return [self._frame.around([], self.usage.document())] if self._options.has_usage else []

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        document = self._frame.around([choice.choice() for choice in self._choices], self.usage.document())
        if self._options.num_prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs_document(self._prompt_logprobs)
        if self._prompt_token_ids is not None:
            document["prompt_token_ids"] = self._prompt_token_ids
        return document

    def reasoning_texts(self) -> list[str]:
        """The reasoning of each choice, told to the client or not; empty of a model whose reasoning nobody knows."""
        return [choice.reasoning or "" for choice in self._choices]

    def count_reasoning(self, start: list[int], end: list[int]) -> list[int | None]:
        """How many tokens the reasoning of each choice is, as far as tokens tell it. See `ChatChoice`."""
        return [choice.count_reasoning(start, end) for choice in self._choices]
