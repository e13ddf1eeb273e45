"""Texts and tokens of llama.cpp's server: prompts of both, biases by text, fill in the middle, and its three routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelserver.frontends.llamacpp.errors import NotSupportedError
from modelserver.frontends.llamacpp.request import MAX_TOKENS, TOKEN_ID, MixedPrompt, SeenPrompt
from modelserver.frontends.llm.answering import fill_marks, no_marks
from modelserver.frontends.llm.call import Prompt
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.prompts import (
    conversation_input,
    token_ids_of,
    token_pieces_of,
    token_texts_of,
)
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.planes.authorized import AnyDataPlane

_MAX_EXTRAS = 256


class Tokens:
    """Asks models for the tokens of texts, and the texts of tokens."""

    def __init__(self, dataplane: AnyDataPlane) -> None:
        self._dataplane = dataplane

    async def tokenize(self, call: Call) -> None:
        """Answer with the tokens of `content`, with their texts if these are asked for. Raises ServerError."""
        fields = call.fields
        name = fields.text("model")
        model = await find_model(self._dataplane, name, "tokenizes" if name else "generates")
        fields.flag("parse_special", True)
        text = fields.text("content") or ""
        adds = fields.flag("add_special")
        if not fields.flag("with_pieces"):
            ids = await self._ids(model, text, adds_special_tokens=adds) if text or adds else []
            call.answer({"tokens": ids})
            return
        prompt = {"text_input": text}
        found = await token_pieces_of(self._dataplane, model, prompt, adds_special_tokens=adds)
        call.answer(
            {"tokens": [{"id": token_id, "piece": _piece(piece)} for token_id, piece in zip(*found, strict=True)]}
        )

    async def detokenize(self, call: Call) -> None:
        """Answer with the text of `tokens`. Raises ServerError."""
        fields = call.fields
        model = await find_model(self._dataplane, fields.text("model"))
        ids = fields.integers("tokens", MAX_TOKENS, TOKEN_ID) or []
        call.answer({"content": (await token_texts_of(self._dataplane, model, [ids]))[0] if ids else ""})

    async def apply_template(self, call: Call) -> None:
        """Answer with the text that the model's template makes of a conversation. Raises ServerError."""
        model = await find_model(self._dataplane, call.fields.text("model"))
        prompt = await conversation_input(self._dataplane, model, read_conversation(call.fields), call.picture_urls)
        text = prompt.get("text_input")
        if text is None:
            _, pieces = await token_pieces_of(self._dataplane, model, prompt, adds_special_tokens=None)
            text = b"".join(pieces).decode(errors="replace")
        call.answer({"prompt": text})

    async def plain(self, model: LanguageModel, prompt: MixedPrompt) -> Prompt:
        """A prompt as models take it: texts among token ids become token ids."""
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, SeenPrompt):
            return prompt.text
        ids: list[int] = []
        for place, part in enumerate(prompt):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += await self._ids(model, part, adds_special_tokens=place == 0)
        return ids

    async def texts(self, model: LanguageModel, prompts: Sequence[Prompt]) -> list[str]:
        """The prompts as texts."""
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        found = iter(await token_texts_of(self._dataplane, model, ids) if ids else ())
        return [prompt if isinstance(prompt, str) else next(found) for prompt in prompts]

    async def biases(self, model: LanguageModel, pairs: Sequence[tuple[int | str, float]]) -> dict[str, float]:
        """`logit_bias` by token id. That of a text holds for each of its tokens."""
        found: dict[str, float] = {}
        for token, bias in pairs:
            ids = [token] if isinstance(token, int) else await self._ids(model, token, adds_special_tokens=False)
            for token_id in ids:
                found[str(token_id)] = bias
        return found

    async def filled(self, model: LanguageModel, fields: Fields) -> tuple[list[int], tuple[int, ...]]:
        """The prompt of `/infill`: what is before and after the cursor, between the model's own marks; and the tokens
        that end the middle.

        Raises NotSupportedError for a model without such marks.
        """
        before = (fields.text("input_prefix") or "") + (fields.text("prompt") or "")
        after = fields.text("input_suffix") or ""
        extras = fields.objects("input_extra", _MAX_EXTRAS) or []
        for extra in extras:
            extra.need("text", "a string")
        marks = await fill_marks(self._dataplane, model)
        if marks is None:
            raise NotSupportedError(no_marks(model))
        files = "".join(f"{extra.text('filename') or 'snippet'}\n{extra.text('text')}\n\n" for extra in extras)
        prompts = [{"text_input": text} for text in (before, after, files)]
        ids = await token_ids_of(self._dataplane, model, prompts, adds_special_tokens=False)
        return marks.prompt(*ids), marks.ends

    async def _ids(self, model: LanguageModel, text: str, *, adds_special_tokens: bool) -> list[int]:
        (ids,) = await token_ids_of(
            self._dataplane, model, [{"text_input": text}], adds_special_tokens=adds_special_tokens
        )
        return ids


def _piece(piece: bytes) -> Any:
    """The text of a token, or its bytes if it is not text by itself."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
