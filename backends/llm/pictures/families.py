"""What differs between checkpoints that see pictures: their placeholders, and how tokens of a picture attend.

The networks that see are those of transformers, which has one call for all: `get_image_features`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

from ..checkpoint import Checkpoint, is_gguf
from ..extension_points import load_extension

# The name of an entry point in this group is a `model_type`, and its object a class like `PictureFamily`.
ENTRY_POINT_GROUP = "modelserver.llm.pictures"


_PREPROCESSOR = ("preprocessor_config.json", "processor_config.json")
_NEEDED = ("transformers", "PIL")


class PictureFamily:
    """Checkpoints whose pictures are a row of tokens; a family overrides what is its own.

    `model_type` is that of config.json. Its language model is a `Family` of its own, by the config's `text_config`.
    `token` is the text of the token whose places embeddings take; `entries` are those of config.json.
    """

    model_type: ClassVar[str]
    # The tokens of a picture see the whole picture, not only what is before them.
    sees_whole: ClassVar[bool] = False

    def __init__(self, entries: Mapping[str, Any], token: str) -> None:
        self.entries = entries
        self.token = token

    @property
    def placeholder(self) -> str:
        """What chat templates write for a picture, and prompts have in its place."""
        return self.token

    @property
    def processor_options(self) -> dict[str, Any]:
        """Options of the image processor's call, beside those of the checkpoint."""
        return {}

    def expansion(self, num_rows: int, _processed: Mapping[str, Any], /) -> str:
        """The text for a picture of that many rows, of which the image processor has made `_processed`."""
        return self.token * num_rows

    def grid(self, _processed: Mapping[str, Any], /) -> tuple[int, int, int] | None:
        """Times, heights and widths of a picture's rows, of families whose positions depend on them."""
        return None


class Llava(PictureFamily):
    model_type = "llava"


_BUNDLED: dict[str, type[PictureFamily]] = {family.model_type: family for family in (Llava,)}


def picture_family(model_type: str) -> type[PictureFamily] | None:
    """The family of a `model_type`; None for one whose pictures are unknown here.

    Raises UnavailableError for an installed one that cannot be imported.
    """
    return _BUNDLED.get(model_type) or load_extension(ENTRY_POINT_GROUP, model_type)


def sees_pictures(checkpoint: Checkpoint, *, tensor_parallel_size: int = 1) -> bool:
    """Whether pictures of a checkpoint can be served here. Nothing but its JSON files is read."""
    entries = checkpoint.config
    return (
        "vision_config" in entries
        and tensor_parallel_size == 1
        and not is_gguf(checkpoint.place)
        and picture_family(entries["model_type"]) is not None
        and any(checkpoint.find(name) for name in _PREPROCESSOR)
        and all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    )
