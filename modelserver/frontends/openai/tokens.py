"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from modelserver.core.accelerator import write_array
from modelserver.core.element_arrays import SLICE_ELEMENTS
from modelserver.core.large_buffers import joined
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.prompts import (
    array_of,
    column_of,
    conversation_input,
    no_output,
    text_of,
    token_texts_of,
)
from modelserver.frontends.llm.requests import only_responses
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.frontends.openai.limits import MAX_TOKEN_IDS
from modelserver.frontends.openai.sampling import TOKEN_ID
from modelserver.planes.authorized import AnyDataPlane

# Items that are written before other threads get a turn.
_ITEMS_AT_ONCE = 4096


class Tokens:
    """Serves the calls of both routes."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def tokenize(self, call: Call) -> None:
        """The tokens of a prompt, or of a conversation in the model's template. Raises ServerError."""
        fields = call.fields
        name = fields.text("model")
        model = await find_model(self._dataplane, name, "tokenizes" if name else "generates")
        needed: dict[str, Any] = {"operation": "tokenize"}
        if fields.has("messages") and fields.has("prompt"):
            raise ParameterError("'prompt' and 'messages' cannot both be given: use one of them", "prompt")
        if fields.has("messages"):
            needed |= await conversation_input(self._dataplane, model, read_conversation(fields), call.picture_urls)
        else:
            fields.need("prompt", "a string, unless there are messages")
            needed["text_input"] = fields.text("prompt")
        if fields.has("add_special_tokens"):
            needed["add_special_tokens"] = fields.flag("add_special_tokens")
        has_texts = fields.flag("return_token_strs")
        request = (await model.requests([needed], {}))[0]
        wanted = ("token_ids", "max_model_len", *(("token_strs",) if has_texts else ()))
        request.outputs = tuple(name for name in wanted if name in model.outputs)
        response = (await only_responses(self._dataplane, [call.adopt(request)]))[0]
        ids = array_of(response, "token_ids")
        if ids is None:
            raise no_output(model, "token_ids")
        texts = array_of(response, "token_strs") if has_texts else None
        told = column_of(response, "max_model_len")
        max_model_len = int(told[0]) if told else model.max_model_len
        answer = _answer_slices(ids, max_model_len, texts)
        call.answer_text(finish(answer) if len(ids) <= SLICE_ELEMENTS else await long_work().run(answer))

    async def detokenize(self, call: Call) -> None:
        """The text of tokens. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"))
        fields.need("tokens", "an array of token ids")
        ids = fields.integers("tokens", MAX_TOKEN_IDS, TOKEN_ID) or []
        call.answer({"prompt": (await token_texts_of(self._dataplane, model, [ids]))[0] if ids else ""})


def _answer_slices(
    ids: np.ndarray[Any, Any], max_model_len: int | None, texts: np.ndarray[Any, Any] | None
) -> Slices[bytes | memoryview]:
    """The answer of `/tokenize`, made in slices: a text may have millions of tokens."""
    parts = [b'{"count":%d,"max_model_len":%b,"tokens":[' % (len(ids), orjson.dumps(max_model_len))]
    yield from _add_items(parts, ids, int)
    if texts is None:
        parts.append(b'],"token_strs":null}')
    else:
        parts.append(b'],"token_strs":[')
        yield from _add_items(parts, texts, text_of)
        parts.append(b"]}")
    return joined(parts)


def _add_items(parts: list[bytes], values: np.ndarray[Any, Any], convert: Callable[[Any], object]) -> Slices[None]:
    """Append the items of a JSON array."""
    for start in range(0, len(values), _ITEMS_AT_ONCE):
        if start:
            parts.append(b",")
        some = values[start : start + _ITEMS_AT_ONCE]
        text = None if write_array is None or some.dtype == object else write_array(some)
        parts.append((orjson.dumps([convert(value) for value in some.tolist()]) if text is None else text)[1:-1])
        yield
