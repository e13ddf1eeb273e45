"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes, and what other calls need of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.generation import only_response, only_responses
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.template import conversation_input
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.sampling import TOKEN_ID

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane


class Tokens:
    """Serves the calls of both routes."""

    def __init__(self, dataplane: AnyDataPlane, limits: OpenAiLimits) -> None:
        self._dataplane = dataplane
        self._limits = limits

    async def tokenize(self, call: Call) -> None:
        """The tokens of a prompt, or of a conversation in the model's template. Raises ServerError."""
        fields = call.fields
        name = fields.text("model")
        model = await find_model(self._dataplane, name, "tokenizes" if name else "generates")
        needed: dict[str, Any] = {"operation": "tokenize"}
        if fields.has("messages") and fields.has("prompt"):
            raise ParameterError("'prompt' and 'messages' cannot both be given: use one of them", "prompt")
        if fields.has("messages"):
            needed |= await conversation_input(self._dataplane, model, read_conversation(fields, self._limits))
        else:
            fields.need("prompt", "a string, unless there are messages")
            needed["text_input"] = fields.text("prompt")
        if fields.has("add_special_tokens"):
            needed["add_special_tokens"] = fields.flag("add_special_tokens")
        has_texts = fields.flag("return_token_strs")
        response = await only_response(self._dataplane, call.adopt(model.request(needed, {})))
        ids = _numbers(model, response, "token_ids")
        max_model_len = model.max_model_len
        told = _column(response, "max_model_len")
        if told:
            max_model_len = int(told[0])
        texts = [_text(entry) for entry in _column(response, "token_strs")] if has_texts else None
        call.answer({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts})

    async def detokenize(self, call: Call) -> None:
        """The text of tokens. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"))
        fields.need("tokens", "an array of token ids")
        ids = fields.integers("tokens", self._limits.max_token_ids, TOKEN_ID) or []
        call.answer({"prompt": (await token_texts_of(self._dataplane, model, [ids]))[0] if ids else ""})


async def token_texts_of(dataplane: AnyDataPlane, model: LanguageModel, prompts: Sequence[list[int]]) -> list[str]:
    """What the tokens of each prompt say. Raises ServerError."""
    requests = [model.request({"operation": "detokenize", "input_ids": ids}, {}) for ids in prompts]
    found = []
    for response in await only_responses(dataplane, requests):
        texts = _column(response, "text_output")
        if not texts:
            raise InternalError(f"model '{model.name}' answered no text_output to the operation detokenize")
        found.append(_text(texts[0]))
    return found


async def token_ids_of(
    dataplane: AnyDataPlane,
    model: LanguageModel,
    prompts: Sequence[dict[str, Any]],
    *,
    adds_special_tokens: bool | None,
) -> list[list[int]]:
    """The tokens of each prompt, which is one of the inputs that have it, as the model reads it. Raises ServerError."""
    common: dict[str, Any] = {"operation": "tokenize"}
    if adds_special_tokens is not None:
        common["add_special_tokens"] = adds_special_tokens
    responses = await only_responses(dataplane, [model.request(common | prompt, {}) for prompt in prompts])
    return [_numbers(model, response, "token_ids") for response in responses]


def _numbers(model: LanguageModel, response: InferResponse, name: str) -> list[int]:
    if all(tensor.name != name for tensor in response.outputs):
        raise ParameterError(f"model '{model.name}' has no output '{name}', which this request needs", "model")
    return [int(value) for value in _column(response, name)]


def _column(response: InferResponse, name: str) -> list[Any]:
    tensor = next((tensor for tensor in response.outputs if tensor.name == name), None)
    return [] if tensor is None else tensor.data.reshape(-1).tolist()


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
