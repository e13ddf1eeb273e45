"""`POST /v1/completions`: each prompt is a request to the model, and all choices one answer or one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelserver.core.request import InferRequest
from modelserver.frontends.llm.edge import Call, event
from modelserver.frontends.llm.generation import Arrival, Generation
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.pieces import Piece, read_pieces
from modelserver.frontends.openai.completion_choice import CompletionChoice
from modelserver.frontends.openai.completion_request import CompletionRequest, Prompt, read_completion
from modelserver.frontends.openai.frame import Frame
from modelserver.frontends.openai.generation_options import generation_inputs
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.tokens import token_ids_of, token_texts_of
from modelserver.frontends.openai.usage import Usage

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane


class Completions:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane, limits: OpenAiLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    async def serve(self, call: Call) -> None:
        """Answer `call`. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        completion = read_completion(call.fields, self._limits)
        requests = [call.adopt(_request(model, completion, prompt)) for prompt in completion.prompts]
        echoes = await self._echoes(model, completion) if completion.is_echoed else None
        ids = await self._token_ids(model, completion) if completion.options.has_token_ids else None
        frame = Frame(call.make_id("cmpl-"), "text_completion", call.created_s, model.name)
        answer = CompletionAnswer(completion, frame, echoes, ids)
        with Generation(self._dataplane, requests) as generation:
            if completion.options.is_streamed:
                await _stream(call, answer, generation)
                return
            async for arrivals in generation.arrivals():
                for arrival in arrivals:
                    answer.take(arrival)
        call.answer(answer.document())

    async def _token_ids(self, model: LanguageModel, completion: CompletionRequest) -> list[list[int]]:
        """The tokens of each prompt."""
        texts = [{"text_input": prompt} for prompt in completion.prompts if isinstance(prompt, str)]
        adds = None if completion.adds_special_tokens else False
        found = iter(await token_ids_of(self._dataplane, model, texts, adds_special_tokens=adds))
        return [next(found) if isinstance(prompt, str) else prompt for prompt in completion.prompts]

    async def _echoes(self, model: LanguageModel, completion: CompletionRequest) -> list[str]:
        """The text of each prompt."""
        ids = [prompt for prompt in completion.prompts if not isinstance(prompt, str)]
        found = iter(await token_texts_of(self._dataplane, model, ids))
        return [prompt if isinstance(prompt, str) else next(found) for prompt in completion.prompts]


def _request(model: LanguageModel, completion: CompletionRequest, prompt: Prompt) -> InferRequest:
    needed, wanted = generation_inputs(completion.options, model.inputs)
    needed["text_input" if isinstance(prompt, str) else "input_ids"] = prompt
    if not completion.adds_special_tokens:
        needed["add_special_tokens"] = False
    return model.request(needed, wanted)


async def _stream(call: Call, answer: CompletionAnswer, generation: Generation) -> None:
    async for arrivals in generation.arrivals():
        events = b"".join(event(chunk) for arrival in arrivals for chunk in answer.chunks(arrival))
        if events:
            await call.send(events)
    await call.send(b"".join(event(chunk) for chunk in answer.last_chunks()))
    await call.finish()


class CompletionAnswer:
    """All choices of a call, as their pieces come."""

    def __init__(
        self,
        completion: CompletionRequest,
        frame: Frame,
        echoes: list[str] | None,
        token_ids: list[list[int]] | None,
    ) -> None:
        """`echoes` and `token_ids` are what is told of each prompt."""
        options = completion.options
        self._options = options
        self._frame = frame
        self._usage = Usage()
        self._choices = [
            [
                CompletionChoice(
                    completion,
                    prompt * options.num_choices + choice,
                    echo=None if echoes is None else echoes[prompt],
                    prompt_token_ids=None if token_ids is None else token_ids[prompt],
                )
                for choice in range(options.num_choices)
            ]
            for prompt in range(len(completion.prompts))
        ]

    def take(self, arrival: Arrival) -> list[CompletionChoice]:
        """Note a response; the choices that it has news of."""
        prompt, response = arrival
        choices = self._choices[prompt]
        touched = [
            self._take_piece(prompt, piece) for piece in read_pieces(response) if 0 <= piece.choice < len(choices)
        ]
        if response.is_final:
            # Of a model that does not say why it ended.
            for choice in choices:
                if not choice.is_finished:
                    choice.finish("stop")
                    touched.append(choice)
        return list(dict.fromkeys(touched))

    def _take_piece(self, prompt: int, piece: Piece) -> CompletionChoice:
        self._usage.take(prompt, piece)
        choice = self._choices[prompt][piece.choice]
        choice.take(piece)
        return choice

    def chunks(self, arrival: Arrival) -> list[dict[str, Any]]:
        """What a response adds to a stream."""
        touched = self.take(arrival)
        if not self._options.has_usage:
            return [self._frame.around_part(choice.flush()) for choice in touched]
        usage = self._usage.document() if self._options.has_continuous_usage else None
        return [self._frame.around([choice.flush()], usage) for choice in touched]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream has after all choices."""
        return [self._frame.around([], self._usage.document())] if self._options.has_usage else []

    def document(self) -> dict[str, Any]:
        """The whole answer: of each prompt the best choices, in their order."""
        num_returned = self._options.num_returned
        found: list[dict[str, Any]] = []
        for choices in self._choices:
            ranked = choices
            if len(choices) > num_returned:
                ranked = sorted(choices, key=_mean_logprob, reverse=True)[:num_returned]
            for choice in ranked:
                choice.index = len(found)
                found.append(choice.flush())
        return self._frame.around(found, self._usage.document())


def _mean_logprob(choice: CompletionChoice) -> float:
    return choice.cumulative_logprob / max(1, choice.num_tokens)
