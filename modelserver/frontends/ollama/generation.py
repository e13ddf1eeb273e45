"""`POST /api/chat`, `/api/generate` and `/api/embed`, and `/api/embeddings`, which was before it and takes one text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from modelserver.frontends.llm.answering import Prepared, answer, prepare
from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.embedding import embed
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.prompts import conversation_input, text_of_template, token_ids_of
from modelserver.frontends.ollama.answers import ChatWriter, GenerateWriter, OllamaDurations, timestamp
from modelserver.frontends.ollama.models import OllamaModels
from modelserver.frontends.ollama.requests import (
    MAX_CONTEXT,
    MAX_INPUTS,
    read_keep_alive,
    read_messages,
    read_options,
    read_sampling,
    read_thinking,
    read_tools,
    with_images,
)
from modelserver.planes.authorized import AnyDataPlane


class Generation:
    """Serves both routes: a call with nothing to answer loads the model, or unloads it with `keep_alive` 0."""

    def __init__(self, dataplane: AnyDataPlane, models: OllamaModels) -> None:
        self._dataplane = dataplane
        self._models = models

    async def chat(self, call: Call) -> None:
        """Answer a conversation. Raises ServerError for what goes wrong before the answer begins."""
        durations = OllamaDurations()
        fields = call.fields
        keep_alive_s = read_keep_alive(fields)
        messages = read_messages(fields)
        if not messages:
            nothing = {"message": {"role": "assistant", "content": ""}}
            await self._load_or_unload(call, durations, keep_alive_s, nothing)
            return
        model = await self._models.find(fields)
        tools = read_tools(fields)
        conversation: dict[str, Any] = _conversation(messages, read_thinking(fields, model))
        if tools.tools:
            conversation["tools"] = list(tools.tools)
        asked = GenerateCall(
            conversation=conversation,
            sampling=read_sampling(fields),
            tools=tools,
            is_streamed=True,
        )
        prepared = _written_as_asked(await prepare(self._dataplane, model, asked, call), fields)
        self._models.keep(call, model.name, keep_alive_s)
        durations.note_sent()
        await answer(self._dataplane, prepared, call, ChatWriter(prepared, call, _name(fields, model), durations))
        if keep_alive_s == 0:
            await self._models.evict(call, model.name)

    async def generate(self, call: Call) -> None:
        """Continue a prompt. Raises ServerError for what goes wrong before the answer begins."""
        durations = OllamaDurations()
        fields = call.fields
        keep_alive_s = read_keep_alive(fields)
        prompt, suffix = fields.text("prompt") or "", fields.text("suffix") or ""
        if not prompt and not suffix:
            await self._load_or_unload(call, durations, keep_alive_s, {"response": ""})
            return
        model = await self._models.find(fields)
        asked, prompt_token_ids = await self._read_prompt(call, model, prompt, suffix)
        prepared = _written_as_asked(await prepare(self._dataplane, model, asked, call), fields)
        self._models.keep(call, model.name, keep_alive_s)
        durations.note_sent()
        writer = GenerateWriter(prepared, call, _name(fields, model), durations, prompt_token_ids)
        await answer(self._dataplane, prepared, call, writer)
        if keep_alive_s == 0:
            await self._models.evict(call, model.name)

    async def _read_prompt(
        self, call: Call, model: LanguageModel, prompt: str, suffix: str
    ) -> tuple[GenerateCall, list[int] | None]:
        """The call, and the tokens of its prompt where the model can tell them and the answer needs them.

        A prompt is the user's message of a template, the model's or the request's; with `raw` it is the text itself,
        and before a `suffix` too where the model takes that by an input of its own.
        """
        fields = call.fields
        sampling = read_sampling(fields)
        context = fields.integers("context", MAX_CONTEXT, Range(0, MAX_INT64))
        system, template = fields.text("system"), fields.text("template")
        if fields.flag("raw") and (context or system or template):
            raise ParameterError("raw mode does not support template, system, or context", "raw")
        content = with_images(fields, prompt)
        by_template = bool(template) or model.fills_in_middle
        if content is not prompt and (fields.flag("raw") or suffix or template or context):
            raise ParameterError("'images' do not go with raw, suffix, template, or context", "images")
        if fields.flag("raw") or (suffix and not by_template):
            if context or system:
                raise ParameterError("'suffix' does not go with system or context", "suffix")
            return GenerateCall(prompts=(prompt,), suffix=suffix, sampling=sampling, is_streamed=True), None
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system and not suffix else []
        messages.append({"role": "user", "content": content})
        arguments = read_thinking(fields, model)
        if suffix:
            arguments["suffix"] = suffix
        if template:
            if context:
                raise ParameterError("'context' does not go with a template of the request", "context")
            text = await text_of_template(self._dataplane, model, template, messages, arguments)
            return GenerateCall(prompts=(text,), sampling=sampling, is_streamed=True), None
        conversation = _conversation(messages, arguments)
        if "operation" not in model.inputs:
            if context:
                raise ParameterError(f"model '{model.name}' cannot take 'context': it has no tokens to tell", "context")
            return GenerateCall(conversation=conversation, sampling=sampling, is_streamed=True), None
        rendered = await conversation_input(self._dataplane, model, conversation, call.picture_urls)
        adds = None if "messages" in rendered else False
        (ids,) = await token_ids_of(self._dataplane, model, [rendered], adds_special_tokens=adds)
        ids = (context or []) + ids
        asked = GenerateCall(
            conversation=None if context else conversation,
            prompts=(ids,) if context else (),
            sampling=sampling,
            is_streamed=True,
            has_token_ids=True,
        )
        return asked, list(ids)

    async def _load_or_unload(
        self, call: Call, durations: OllamaDurations, keep_alive_s: float | None, nothing: dict[str, Any]
    ) -> None:
        fields = call.fields
        if keep_alive_s == 0:
            name = await self._models.unload(call)
            reason = "unload"
        else:
            model = await self._models.find(fields)
            self._models.keep(call, model.name, keep_alive_s)
            name, reason = _name(fields, model), "load"
        durations.note_sent()
        document = {"model": name, "created_at": timestamp(), **nothing, "done": True, "done_reason": reason}
        if reason == "load":
            document |= durations.loaded()
        if fields.flag("stream", True):
            # A stream of one line: clients read lines.
            call.send(call.framing.frame(orjson.dumps(document)))
            await call.finish()
        else:
            call.answer(document)


def _written_as_asked(prepared: Prepared, fields: Fields) -> Prepared:
    """The model streams in any case, which tells when its first token came; the answer may be whole."""
    return replace(prepared, call=replace(prepared.call, is_streamed=fields.flag("stream", True)))


def _conversation(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """What chat templates take. Messages that end in one of the assistant's are to be continued."""
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    conversation: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    if arguments:
        conversation["chat_template_kwargs"] = arguments
    return conversation


def _name(fields: Fields, model: LanguageModel) -> str:
    return fields.text("model") or model.name


_MAX_DIMENSIONS = 1 << 20
# As long as the model takes.
_LONGEST = -1


class Embedding:
    """Serves both routes."""

    def __init__(self, dataplane: AnyDataPlane, models: OllamaModels) -> None:
        self._dataplane = dataplane
        self._models = models

    async def embed(self, call: Call) -> None:
        """Answer with a vector for each text. Raises ServerError."""
        durations = OllamaDurations()
        fields = call.fields
        texts = _read_input(fields)
        read_options(fields)
        keep_alive_s = read_keep_alive(fields)
        model = await self._models.find(fields, "embeds")
        inputs = self._common(fields, model)
        durations.note_sent()
        made = await embed(self._dataplane, model, call, [inputs | {"text_input": text} for text in texts])
        self._models.keep(call, model.name, keep_alive_s)
        call.answer(
            {
                "model": fields.text("model") or model.name,
                "embeddings": [vector.tolist() for vector in made.vectors],
                **durations.loaded(),
                "prompt_eval_count": made.num_tokens,
            }
        )

    async def embed_one(self, call: Call) -> None:
        """Answer with the vector of one text. Raises ServerError."""
        fields = call.fields
        text = fields.text("prompt") or ""
        read_options(fields)
        model = await self._models.find(fields, "embeds")
        if not text:
            # A call without a text only loads the model.
            call.answer({"embedding": []})
            return
        made = await embed(self._dataplane, model, call, [self._common(fields, model) | {"text_input": text}])
        call.answer({"embedding": made.vectors[0].tolist()})

    def _common(self, fields: Fields, model: LanguageModel) -> dict[str, Any]:
        """The inputs besides the text. Raises ParameterError."""
        inputs: dict[str, Any] = {}
        dimensions = fields.integer("dimensions", Range(0, _MAX_DIMENSIONS))
        if dimensions:
            if "dimensions" not in model.inputs:
                raise ParameterError(
                    f"model '{model.name}' has embeddings of one size only: leave 'dimensions' out", "dimensions"
                )
            inputs["dimensions"] = dimensions
        if fields.flag("truncate", True) and "truncate_prompt_tokens" in model.inputs:
            inputs["truncate_prompt_tokens"] = _LONGEST
        return inputs


def _read_input(fields: Fields) -> list[str]:
    fields.need("input", "a text or an array of texts")
    value = fields.document["input"]
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ParameterError(f"invalid input type: expected a text or an array of texts, got {value!r:.60}", "input")
    return fields.texts("input", MAX_INPUTS) or []
