"""The tokens of texts, and the text of tokens, as a model's own tokenizer has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelserver.core.response import InferResponse
from modelserver.errors import InternalError
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.requests import only_responses

if TYPE_CHECKING:
    from modelserver.planes.data import AnyDataPlane


async def token_texts_of(dataplane: AnyDataPlane, model: LanguageModel, prompts: Sequence[list[int]]) -> list[str]:
    """What the tokens of each prompt say. Raises ServerError."""
    requests = [model.request({"operation": "detokenize", "input_ids": ids}, {}) for ids in prompts]
    found = []
    for response in await only_responses(dataplane, requests):
        texts = column_of(response, "text_output")
        if not texts:
            raise InternalError(f"model '{model.name}' answered no text_output to the operation detokenize")
        found.append(text_of(texts[0]))
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
    return [numbers_of(model, response, "token_ids") for response in responses]


def numbers_of(model: LanguageModel, response: InferResponse, name: str) -> list[int]:
    """The numbers of an output. Raises ParameterError where the model does not have it."""
    if all(tensor.name != name for tensor in response.outputs):
        raise ParameterError(f"model '{model.name}' has no output '{name}', which this request needs", "model")
    return [int(value) for value in column_of(response, name)]


def column_of(response: InferResponse, name: str) -> list[Any]:
    """The elements of an output; none where it is missing."""
    tensor = next((tensor for tensor in response.outputs if tensor.name == name), None)
    return [] if tensor is None else tensor.data.reshape(-1).tolist()


def text_of(value: bytes | str) -> str:
    """An element of a BYTES output as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
