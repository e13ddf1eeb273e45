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

from support.tiny_checkpoints import BOS_TOKEN_ID, EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, _draw, write_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 8,
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
    entries["chat_template"] = _TEMPLATE % (described.written or described.tokens[0])
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
def _reference(directory: Path, family: str) -> tuple[Any, Any]:
    import torch
    import transformers

    described = FAMILIES[family]
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = EOS_TOKEN_ID
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token=SPECIAL_TOKENS[BOS_TOKEN_ID],
        eos_token=SPECIAL_TOKENS[EOS_TOKEN_ID],
        pad_token=SPECIAL_TOKENS[EOS_TOKEN_ID],
    )
    images = getattr(transformers, described.image_processor)(**described.images)
    processor = getattr(transformers, described.processor)(images, tokenizer, **described.processing)
    return model, processor


def reference_answer(
    directory: Path, family: str, text: str, pictures: Sequence[bytes], num_tokens: int
) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, and those with which transformers' generate() goes on, greedily.

    `text` is what the chat template makes of `conversation(text, *pictures)`, by `prompt_text`.
    """
    import torch
    from PIL import Image

    model, processor = _reference(directory, family)
    opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    inputs = processor(text=[text], images=opened or None, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    prompt = inputs["input_ids"][0].tolist()
    return prompt, [int(token) for token in output[0, len(prompt) :]]


def prompt_text(family: str, text: str, num_pictures: int = 1) -> str:
    """What the template writes of a conversation of one message."""
    written = FAMILIES[family].written or FAMILIES[family].tokens[0]
    return f"<|bos|><|im_start|>user\n{written * num_pictures}{text}<|im_end|>\n<|im_start|>assistant\n"
