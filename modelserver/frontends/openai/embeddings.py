"""`POST /v1/embeddings`: a request to the model for each input."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.embedding import embed
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.frontends.openai.completion_request import read_prompts
from modelserver.frontends.openai.sampling import refuse_unsupported
from modelserver.planes.authorized import AnyDataPlane

_FORMATS = ("float", "base64")
_MAX_DIMENSIONS = 1 << 20
MAX_INT32 = 2**31 - 1


class Embeddings:
    """Serves the calls of the route."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def serve(self, call: Call) -> None:
        """Answer `call`. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"), "embeds")
        refuse_unsupported(fields, offered=model.inputs.keys() & {"truncate_prompt_tokens"})
        is_base64 = fields.word("encoding_format", _FORMATS) == "base64"
        common = _common_inputs(fields, model)
        made = await embed(self._dataplane, model, call, [common | each for each in _inputs(fields)])
        call.answer(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": _encode(vector, is_base64=is_base64)}
                    for index, vector in enumerate(made.vectors)
                ],
                "model": model.answers_as,
                "usage": {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens},
            }
        )


def _common_inputs(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """What every input of the call has in common."""
    common: dict[str, Any] = {}
    dimensions = fields.integer("dimensions", Range(1, _MAX_DIMENSIONS))
    if dimensions is not None:
        if "dimensions" not in model.inputs:
            raise ParameterError(
                f"model '{model.name}' has embeddings of one size only: leave 'dimensions' out", "dimensions"
            )
        common["dimensions"] = dimensions
    truncation = fields.integer("truncate_prompt_tokens", Range(-1, MAX_INT32))
    if truncation is not None:
        common["truncate_prompt_tokens"] = truncation
    if fields.has("add_special_tokens"):
        common["add_special_tokens"] = fields.flag("add_special_tokens", True)
    return common


def _inputs(fields: Fields) -> list[dict[str, Any]]:
    """One for each embedding."""
    if fields.has("messages") and fields.has("input"):
        raise ParameterError("'input' and 'messages' cannot both be given: use one of them", "input")
    if fields.has("messages"):
        return [{"messages": read_conversation(fields)}]
    prompts = read_prompts(fields, "input")
    return [{"text_input" if isinstance(prompt, str) else "input_ids": prompt} for prompt in prompts]


def _encode(vector: np.ndarray[Any, Any], *, is_base64: bool) -> list[float] | str:
    if is_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
