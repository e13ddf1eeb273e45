"""Tokens in TGI's documents: those of `/tokenize` and `/chat_tokenize`, with their places in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.models import LanguageModel, find_model
from modelserver.frontends.llm.prompts import conversation_input, token_pieces_of
from modelserver.frontends.openai.chat_request import read_conversation
from modelserver.frontends.openai.limits import OpenAiLimits

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyDataPlane

Document = dict[str, Any]


async def tokenize(dataplane: AnyDataPlane, call: Call, name: str) -> None:
    """Answer with the tokens of `inputs`. Raises ServerError."""
    fields = call.fields
    model = await find_model(dataplane, name, "tokenizes" if name else "generates")
    fields.need("inputs", "a string")
    text = fields.text("inputs") or ""
    adds = fields.flag("add_special_tokens", True)
    call.answer(await _tokens(dataplane, model, text, adds_special_tokens=adds))


async def chat_tokenize(dataplane: AnyDataPlane, call: Call, name: str) -> None:
    """Answer with the text that the model's template makes of a conversation, and its tokens. Raises ServerError."""
    model = await find_model(dataplane, name, "tokenizes" if name else "generates")
    prompt = await conversation_input(
        dataplane, model, read_conversation(call.fields, OpenAiLimits()), call.picture_urls
    )
    # A template has written the special tokens.
    adds = False if "text_input" in prompt else None
    ids, pieces = await token_pieces_of(dataplane, model, prompt, adds_special_tokens=adds)
    text = b"".join(pieces).decode(errors="replace") if ids else ""
    text = prompt.get("text_input", text)
    call.answer({"tokenize_response": _placed(text, ids, pieces), "templated_text": text})


async def _tokens(
    dataplane: AnyDataPlane, model: LanguageModel, text: str, *, adds_special_tokens: bool
) -> list[Document]:
    prompt = {"text_input": text}
    ids, pieces = await token_pieces_of(dataplane, model, prompt, adds_special_tokens=adds_special_tokens)
    return _placed(text, ids, pieces)


def _placed(text: str, ids: Sequence[int], pieces: Sequence[bytes]) -> list[Document]:
    """The tokens with their places, in characters.

    A token that is not a part of the text, such as one for its beginning, has an empty place.
    """
    data = text.encode("utf-8", "replace")
    found = []
    at = num_chars = 0
    for token_id, piece in zip(ids, pieces, strict=True):
        if not data.startswith(piece, at):
            # Some tokenizers put a space before the text.
            bare = piece.removeprefix(b" ")
            piece = bare if data.startswith(bare, at) else b""
        start = num_chars
        at += len(piece)
        # A character counts where it begins.
        num_chars += sum(byte & 0xC0 != 0x80 for byte in piece)
        found.append({"id": token_id, "text": text[start:num_chars], "start": start, "stop": num_chars})
    return found
