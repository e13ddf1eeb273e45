"""Pictures in conversations: parts of messages until the model is asked, and then elements of its input `image`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserver.errors import InvalidArgumentError
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.picture_urls import PictureUrls

# The input of models that see pictures, and what stands for one of them in a text.
IMAGE = "image"
MARK = "<__media__>"


@dataclass(frozen=True, slots=True)
class Picture:
    """What a client gave: the base64 of a file, or a URL. `param` is its path in the request's document."""

    source: str
    param: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether the source is a URL that is to be fetched."""
        return "://" in self.source[:16]


def picture_part(picture: Picture) -> dict[str, Any]:
    """The part of a message's content for a picture."""
    return {"type": "image", IMAGE: picture}


def read_picture(fields: Fields, name: str) -> dict[str, Any]:
    """The part for the picture whose source is the member `name`. Raises ParameterError."""
    fields.need(name, "a data: URL, or the base64 of a picture")
    return picture_part(Picture(fields.text(name) or "", fields.path(name)))


def joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content as templates take it: texts become a line each, and parts only where there are pictures."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == 1 == len(parts):
        return texts[0]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def take_pictures(model: LanguageModel, conversation: Mapping[str, Any]) -> tuple[dict[str, Any], list[Picture]]:
    """The conversation with places for its pictures, and the pictures in their order.

    Raises ParameterError, which names the first picture, for a model that sees none.
    """
    found: list[Picture] = []
    messages = []
    for message in conversation["messages"]:
        content = message["content"]
        if isinstance(content, list):
            found += [part[IMAGE] for part in content if IMAGE in part]
            parts = [{"type": "image"} if IMAGE in part else part for part in content]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    if found and "messages" not in model.inputs:
        raise _sees_none(model, found[0])
    return {**conversation, "messages": messages} if found else dict(conversation), found


def _sees_none(model: LanguageModel, picture: Picture) -> ParameterError:
    return ParameterError(
        f"'{picture.param}': the model '{model.name}' takes text only, and no pictures",
        picture.param,
        Fault.UNSUPPORTED_CONTENT,
    )


async def sources_of(model: LanguageModel, pictures: Sequence[Picture], urls: PictureUrls) -> tuple[str | bytes, ...]:
    """Base64, data: URLs, or files that were fetched.

    Raises ParameterError, which names the picture, for what cannot be, and for a model that sees none.
    """
    if IMAGE not in model.inputs:
        raise _sees_none(model, pictures[0])
    elsewhere = [picture for picture in pictures if picture.is_elsewhere]
    if not elsewhere:
        return tuple(picture.source for picture in pictures)
    try:
        fetched = iter(await urls.fetch([picture.source for picture in elsewhere]))
    except InvalidArgumentError as error:
        param = elsewhere[0].param
        raise ParameterError(f"'{param}': {error.message}", param, Fault.UNSUPPORTED_CONTENT) from None
    return tuple(next(fetched) if picture.is_elsewhere else picture.source for picture in pictures)
