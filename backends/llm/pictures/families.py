"""What differs between checkpoints that see pictures: their placeholders, and how tokens of a picture attend.

The networks that see are those of transformers, which has one call for all: `get_image_features`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from modelserver.backend import InvalidArgumentError

from ..checkpoint import Checkpoint, is_gguf
from ..extension_points import load_extension

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

# The name of an entry point in this group is a `model_type`, and its object a class like `PictureFamily`.
ENTRY_POINT_GROUP = "modelserver.llm.pictures"


_PREPROCESSOR = ("preprocessor_config.json", "processor_config.json")
_NEEDED = ("transformers", "PIL")


class PictureFamily:
    """Checkpoints whose pictures are rows of one token; a family overrides what is its own.

    `model_type` is that of config.json. The language model is a `Family` of its own, by the config's `text_config`.
    `token` is the text of the token whose places embeddings take; `entries` are those of config.json.
    """

    model_type: ClassVar[str]
    # The tokens of a picture see the whole picture, not only what is before them.
    sees_whole: ClassVar[bool] = False

    def __init__(self, entries: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Raises InvalidArgumentError for a tokenizer that lacks the token of pictures."""
        self.entries = entries
        self._tokenizer = tokenizer
        self.token_id = self._entry("image_token_id", "image_token_index")
        self.token = self.token_text(self.token_id)

    @property
    def placeholder(self) -> str:
        """What chat templates write for a picture, and prompts have in its place."""
        return self.token

    @property
    def in_text(self) -> str:
        """The placeholder with the tokens that the chat template writes around it."""
        return self.placeholder

    @property
    def processor_options(self) -> dict[str, Any]:
        """Options of the image processor's call, beside those of the checkpoint."""
        return {}

    @property
    def longest_run(self) -> int:
        """How many tokens of a picture that is seen whole follow each other: a step computes all of them."""
        return 0

    def expansion(self, num_rows: int, _processed: Mapping[str, Any], /) -> str:
        """The text for a picture of that many rows, of which the image processor has made `_processed`."""
        return self.token * num_rows

    def grid(self, _processed: Mapping[str, Any], /) -> tuple[int, int, int] | None:
        """Times, heights and widths of a picture's rows, of families whose positions depend on them."""
        return None

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it. Raises InvalidArgumentError without one."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            raise InvalidArgumentError(f"config.json names the token {token_id}, which the tokenizer does not have")
        return token

    def _entry(self, *names: str) -> int:
        for name in names:
            if self.entries.get(name) is not None:
                return int(self.entries[name])
        raise InvalidArgumentError(f"config.json of a {self.model_type} has no {names[0]}")


class Llava(PictureFamily):
    model_type = "llava"


class Idefics3(PictureFamily):
    """Pictures are cut into tiles, with the whole behind them; text says which is which."""

    model_type = "idefics3"

    @property
    def processor_options(self) -> dict[str, Any]:
        return {"return_row_col_info": True}

    def expansion(self, num_rows: int, processed: Mapping[str, Any], /) -> str:
        (rows,), (columns,) = processed["rows"][0], processed["cols"][0]
        tile = self.token * (num_rows // (rows * columns + 1))
        border = "<fake_token_around_image>"
        lines = [
            "".join(f"{border}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{border}<global-img>{tile}{border}"


class SmolVlm(Idefics3):
    model_type = "smolvlm"


class InternVl(PictureFamily):
    """Pictures are cut into tiles, whose rows follow each other."""

    model_type = "internvl"

    @property
    def processor_options(self) -> dict[str, Any]:
        return {"crop_to_patches": True}

    def expansion(self, num_rows: int, _processed: Mapping[str, Any], /) -> str:
        return f"<img>{self.token * num_rows}</img>"


class Gemma3(PictureFamily):
    """Crops of a picture (pan and scan) are pictures of their own, with a sentence between them and the whole."""

    model_type = "gemma3"
    sees_whole = True

    @property
    def placeholder(self) -> str:
        return self.token_text(self._entry("boi_token_index"))

    @property
    def longest_run(self) -> int:
        return self._entry("mm_tokens_per_image")

    def expansion(self, _num_rows: int, processed: Mapping[str, Any], /) -> str:
        end = self.token_text(self._entry("eoi_token_index"))
        whole = f"\n\n{self.placeholder}{self.token * self.longest_run}{end}\n\n"
        num_crops = int(processed["num_crops"][0])
        if not num_crops:
            return whole
        crops = " ".join([whole] * num_crops)
        return f"Here is the original image {whole} and here are some crops to help you see better {crops}"


class Qwen25Vl(PictureFamily):
    """Pictures of any size, in rows by height and width."""

    model_type = "qwen2_5_vl"

    @property
    def in_text(self) -> str:
        start, end = (self.token_text(self._entry(f"vision_{name}_token_id")) for name in ("start", "end"))
        return f"{start}{self.placeholder}{end}"

    def grid(self, processed: Mapping[str, Any], /) -> tuple[int, int, int]:
        time, height, width = (int(size) for size in processed["image_grid_thw"][0])
        merged = int(self.entries["vision_config"]["spatial_merge_size"])
        return time, height // merged, width // merged


class Qwen2Vl(Qwen25Vl):
    model_type = "qwen2_vl"


class Qwen3Vl(Qwen25Vl):
    model_type = "qwen3_vl"


_BUNDLED: dict[str, type[PictureFamily]] = {
    family.model_type: family for family in (Llava, Idefics3, SmolVlm, InternVl, Gemma3, Qwen2Vl, Qwen25Vl, Qwen3Vl)
}


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
