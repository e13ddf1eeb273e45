"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.models import find_model
from modelserver.frontends.llm.prompts import column_of, conversation_input, numbers_of, text_of, token_texts_of
from modelserver.frontends.llm.requests import only_responses
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
        response = (await only_responses(self._dataplane, [call.adopt(model.request(needed, {}))]))[0]
        ids = numbers_of(model, response, "token_ids")
        max_model_len = model.max_model_len
        told = column_of(response, "max_model_len")
        if told:
            max_model_len = int(told[0])
        texts = [text_of(entry) for entry in column_of(response, "token_strs")] if has_texts else None
        call.answer({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts})

    async def detokenize(self, call: Call) -> None:
        """The text of tokens. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"))
        fields.need("tokens", "an array of token ids")
        ids = fields.integers("tokens", self._limits.max_token_ids, TOKEN_ID) or []
        call.answer({"prompt": (await token_texts_of(self._dataplane, model, [ids]))[0] if ids else ""})
