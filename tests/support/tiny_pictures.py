"""Tiny random checkpoints of the families that see pictures, made by transformers' own classes, and its answers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from support.tiny_checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, _draw, write_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 16,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
# Every message's parts in their order, as templates of these models have it.
_TEMPLATE = (
    "{{ bos_token }}{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@dataclass(frozen=True)
class PictureFamily:
    """`tokens` are added to the tokenizer; embeddings take the places of the first. Templates write `written`."""

    model_type: str
    text_type: str
    vision: Mapping[str, Any]
    tokens: tuple[str, ...]
    processor: str
    processing: Mapping[str, Any]
    image_processor: str
    values: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""
    placeholder: str = ""
    # How transformers' image processor is called, and the input that says which tokens are pictures.
    call: Mapping[str, Any] = field(default_factory=dict)
    is_nested: bool = False
    types: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "placeholder", self.placeholder or self.tokens[0])
        object.__setattr__(self, "written", self.written or self.placeholder)


_TILED: dict[str, Any] = {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 56}}
_TILE_TOKENS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
_QWEN_VIT: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 7,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_VALUES = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_IMAGES: dict[str, Any] = {
    "patch_size": 7,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 14 * 14, "longest_edge": 70 * 70},
}
_QWEN_WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"


def _mrope(**values: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **values},
        "max_window_layers": 3,
        "hidden_size": 64,
    }


FAMILIES: dict[str, PictureFamily] = {
    "llava": PictureFamily(
        "llava",
        "llama",
        {"model_type": "clip_vision_model", **_VIT, "projection_dim": 32},
        ("<image>",),
        "LlavaProcessor",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "CLIPImageProcessor",
        {"image_seq_length": 16, "vision_feature_layer": -2, "projector_hidden_act": "gelu"},
        images={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    ),
    "smolvlm": PictureFamily(
        "smolvlm",
        "llama",
        _VIT,
        ("<image>", "<fake_token_around_image>", "<global-img>", *_TILE_TOKENS),
        "Idefics3Processor",
        {"image_seq_len": 4, "fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"},
        "Idefics3ImageProcessor",
        {"scale_factor": 2},
        images=_TILED,
        call={"return_row_col_info": True},
        is_nested=True,
    ),
    "internvl": PictureFamily(
        "internvl",
        "qwen2",
        {**_VIT, "image_size": [28, 28], "patch_size": [7, 7]},
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "InternVLProcessor",
        {"image_seq_length": 4, "start_image_token": "<img>", "end_image_token": "</img>"},
        "GotOcr2ImageProcessor",
        {"image_seq_length": 4, "downsample_ratio": 0.5},
        images={"size": {"height": 28, "width": 28}, "max_patches": 4},
        call={"crop_to_patches": True},
    ),
    "gemma3": PictureFamily(
        "gemma3",
        "gemma3_text",
        {"model_type": "siglip_vision_model", **_VIT, "vision_use_head": False},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "Gemma3Processor",
        {"full_image_sequence": f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"},
        "Gemma3ImageProcessor",
        {"mm_tokens_per_image": 4, "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        text={
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        images={"size": {"height": 28, "width": 28}},
        placeholder="<start_of_image>",
        types="token_type_ids",
    ),
    "qwen2_5_vl": PictureFamily(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        {**_QWEN_VIT, "window_size": 28, "fullatt_block_indexes": [1]},
        _QWEN_TOKENS,
        "Qwen2_5_VLProcessor",
        {},
        "Qwen2VLImageProcessor",
        _QWEN_VALUES,
        text=_mrope(),
        images=_QWEN_IMAGES,
        written=_QWEN_WRITTEN,
        types="mm_token_type_ids",
    ),
    "qwen3_vl": PictureFamily(
        "qwen3_vl",
        "qwen3_vl_text",
        {**_QWEN_VIT, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        _QWEN_TOKENS,
        "Qwen3VLProcessor",
        {},
        "Qwen2VLImageProcessor",
        _QWEN_VALUES,
        text=_mrope(mrope_interleaved=True),
        images=_QWEN_IMAGES,
        written=_QWEN_WRITTEN,
        types="mm_token_type_ids",
    ),
}


def write_picture_checkpoint(directory: Path, family: str, *, seed: int = 0) -> Path:
    """A checkpoint with config, weights, tokenizer, chat template and the settings of its image processor."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    described = FAMILIES[family]
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    token_ids = _add_tokens(directory, described)
    values = {
        name: token_ids[value] if isinstance(value, str) and value in token_ids else value
        for name, value in described.values.items()
    }
    config = transformers.AutoConfig.for_model(
        described.model_type,
        text_config={"model_type": described.text_type, **_TEXT, **described.text},
        vision_config=dict(described.vision),
        image_token_id=token_ids[described.tokens[0]],
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        **values,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, is_tied=False)
            if "mm_input_projection" in name:
                parameter.mul_(6)  # as large as the scaled embeddings of text
    model.save_pretrained(directory)
    processor = getattr(transformers, described.image_processor)(**described.images)
    processor.save_pretrained(directory)
    return directory


def _add_tokens(directory: Path, described: PictureFamily) -> dict[str, int]:
    """The ids of the family's tokens."""
    from tokenizers import AddedToken, Tokenizer

    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in described.tokens])
    tokenizer.save(str(path))
    path = directory / "tokenizer_config.json"
    entries = json.loads(path.read_text())
    entries["chat_template"] = _TEMPLATE % described.written
    path.write_text(json.dumps(entries))
    return {token: tokenizer.token_to_id(token) for token in described.tokens}


def draw_picture(seed: int = 0, size: tuple[int, int] = (40, 30)) -> bytes:
    """A random picture as PNG."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def conversation(text: str, *pictures: bytes) -> list[dict[str, Any]]:
    """One message of OpenAI's API, the pictures before the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@lru_cache(maxsize=2)
def _reference(directory: Path, family: str) -> tuple[Any, Any, Any]:
    """transformers' model, its image processor, and its tokenizer."""
    import torch
    import transformers

    described = FAMILIES[family]
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = EOS_TOKEN_ID
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return model, getattr(transformers, described.image_processor)(**described.images), tokenizer


def reference_answer(
    directory: Path, family: str, text: str, pictures: Sequence[bytes], num_tokens: int
) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, and those with which transformers' generate() goes on, greedily.

    `text` is what the chat template makes of `conversation(text, *pictures)`, by `prompt_text`. Its placeholders are
    expanded by transformers' processor of the family, made without the parts that need other packages.
    """
    import torch
    import transformers
    from PIL import Image

    described = FAMILIES[family]
    model, images, tokenizer = _reference(directory, family)
    inputs: dict[str, Any] = {}
    if pictures:
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        inputs = dict(images(images=[opened] if described.is_nested else opened, return_tensors="pt", **described.call))
        kind = getattr(transformers, described.processor)
        processor = kind.__new__(kind)
        vars(processor).update({"image_processor": images, "image_token": described.tokens[0], **described.processing})
        expanded = [processor.replace_image_token(inputs, image_idx=index) for index in range(len(pictures))]
        pieces = text.split(described.placeholder)
        text = "".join(piece for pair in zip(pieces, [*expanded, ""], strict=True) for piece in pair)
        inputs = {
            name: value for name, value in inputs.items() if name not in ("rows", "cols", "num_crops", "num_patches")
        }
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt])
    if pictures and described.types:
        inputs[described.types] = (ids == tokenizer.convert_tokens_to_ids(described.tokens[0])).long()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **inputs
        )
    return prompt, [int(token) for token in output[0, len(prompt) :]]


def prompt_text(family: str, text: str, num_pictures: int = 1) -> str:
    """What the template writes of a conversation of one message."""
    written = FAMILIES[family].written
    return f"<|bos|><|im_start|>user\n{written * num_pictures}{text}<|im_end|>\n<|im_start|>assistant\n"
