"""`POST /v1/completions`: each prompt is a request to the model, and all choices one answer or one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from modelserver.frontends.http.framing import Framing, PreparedFrame
from modelserver.frontends.llm.answering import News, Prepared, answer, prepare
from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.choices import Choice, Said
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.events import Event, Finish, Text, Tokens
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.prompts import token_ids_of, token_texts_of
from modelserver.frontends.openai.answer_parts import (
    ChoicesWriter,
    CompletionLogprobs,
    Envelope,
    prompt_entries,
    prompt_logprobs_document,
    usage_document,
)
from modelserver.frontends.openai.completion_request import CompletionRequest, read_completion
from modelserver.planes.authorized import AnyDataPlane


class Completions:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def serve(self, call: Call) -> None:
        """Answer `call`. Raises ServerError for what goes wrong before the answer begins."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        completion = read_completion(call.fields)
        prepared = await prepare(self._dataplane, model, completion.call, call)
        echoes = await self._echoes(model, completion) if completion.is_echoed else None
        ids = await self._token_ids(model, prepared.call) if completion.call.has_token_ids else None
        envelope = Envelope(call.make_id("cmpl-"), "text_completion", call.created_s, model.answers_as)
        writer = CompletionWriter(completion, prepared, envelope, call.framing, echoes=echoes, token_ids=ids)
        await answer(self._dataplane, prepared, call, writer)

    async def _token_ids(self, model: LanguageModel, asked: GenerateCall) -> list[list[int]]:
        """The tokens of each prompt."""
        prompts = asked.prompts
        texts = [{"text_input": prompt} for prompt in prompts if isinstance(prompt, str)]
        adds = asked.adds_special_tokens
        found = iter(await token_ids_of(self._dataplane, model, texts, adds_special_tokens=adds))
        return [next(found) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _echoes(self, model: LanguageModel, completion: CompletionRequest) -> list[str]:
        """The text of each prompt."""
        prompts = completion.call.prompts
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        found = iter(await token_texts_of(self._dataplane, model, ids))
        return [prompt if isinstance(prompt, str) else next(found) for prompt in prompts]


class CompletionWriter(ChoicesWriter):
    """Of prompts."""

    def __init__(
        self,
        completion: CompletionRequest,
        prepared: Prepared,
        envelope: Envelope,
        framing: Framing,
        *,
        echoes: list[str] | None,
        token_ids: list[list[int]] | None,
    ) -> None:
        """`echoes` and `token_ids` belong to the prompts, in their order."""
        super().__init__(completion.options, prepared, envelope, framing)
        self._by_prompt = [
            [
                _CompletionChoice(
                    completion,
                    choice,
                    echo=None if echoes is None else echoes[prompt],
                    prompt_token_ids=None if token_ids is None else token_ids[prompt],
                )
                for choice in choices
            ]
            for prompt, choices in enumerate(prepared.choices)
        ]
        self._choices = [written for choices in self._by_prompt for written in choices]

    def _other_frames(self, news: News) -> bytes:
        self.note(news)
        return b"".join(self._frame(choice) for choice, _ in news)

    def note(self, news: News) -> None:
        for choice, events in news:
            self._choices[choice.number].add(events)

    def document(self) -> dict[str, Any]:
        """The whole answer: of each prompt the best choices, in their order."""
        num_returned = self._options.num_returned
        found: list[dict[str, Any]] = []
        for choices in self._by_prompt:
            ranked = choices
            if len(choices) > num_returned:
                ranked = sorted(choices, key=_CompletionChoice.mean_logprob, reverse=True)[:num_returned]
            for choice in ranked:
                found.append({**choice.flush(), "index": len(found)})
        return self._envelope.around(found, usage_document(self._usage))

    def _frame(self, choice: Choice) -> bytes:
        written = self._choices[choice.number]
        frame = self._framing.frame(orjson.dumps(self._around(written.flush())))
        self._prepare_frame(
            choice, lambda: {**written.flush(), "text": PreparedFrame.MARK}, has_tokens=written.has_tokens
        )
        return frame


class _CompletionChoice:
    """What is written of one choice. `echo` is the prompt's text if that is to precede it; `prompt_token_ids` are told
    at the beginning."""

    def __init__(
        self, completion: CompletionRequest, choice: Choice, *, echo: str | None, prompt_token_ids: list[int] | None
    ) -> None:
        self.has_tokens = completion.call.num_logprobs is not None or completion.call.has_token_ids
        # Text that is left out makes no plain chunks.
        self.has_tokens = self.has_tokens or not completion.has_text
        self._completion = completion
        self._choice = choice
        self._echo = echo
        self._prompt_token_ids = prompt_token_ids
        self._is_begun = False
        self._logprobs = CompletionLogprobs(by_id=completion.options.names_tokens_by_id)
        self._said = Said()

    def add(self, events: Sequence[Event]) -> None:
        """Note what the model says."""
        if not self._is_begun:
            self._is_begun = True
            self._begin()
        if not self._completion.has_text:
            events = [event for event in events if isinstance(event, Finish)]
        self._said.add(events)

    def mean_logprob(self) -> float:
        """By which the choices of a prompt are ranked."""
        return self._choice.cumulative_logprob / max(1, self._choice.num_tokens)

    def flush(self) -> dict[str, Any]:
        """The choice with what was noted since the last time."""
        call, said = self._completion.call, self._said
        finish = said.finish
        choice: dict[str, Any] = {
            "index": self._choice.number,
            "text": said.text,
            "logprobs": None if call.num_logprobs is None else self._logprobs.take(said.logprobs),
            "finish_reason": None if finish is None else finish.reason,
            "stop_reason": None if finish is None else finish.stop_reason,
        }
        if call.has_token_ids:
            choice["token_ids"] = said.token_ids
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        if call.num_prompt_logprobs is not None and not call.is_streamed:
            choice["prompt_logprobs"] = prompt_logprobs_document(self._choice.prompt_logprobs)
        said.forget_text()
        said.forget_tokens()
        return choice

    def _begin(self) -> None:
        if self._echo is None:
            return
        entries = []
        if self._choice.prompt_logprobs is not None:
            entries = prompt_entries(self._choice.prompt_logprobs, self._echo)
        self._said.add([Text(self._echo), Tokens([], entries)])
