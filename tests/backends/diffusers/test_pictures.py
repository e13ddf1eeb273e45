"""A pipeline of diffusers draws for OpenAI's client as it draws for its own library."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import openai
import pytest
import torch
import tqdm
import transformers
from PIL import Image
from support.contexts import context_of, loaded
from support.serving import running_server

from modelserver.backend import InvalidArgumentError, Placement
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_files

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion with random weights: pictures of 16 by 16 pixels."""
    tqdm.tqdm.monitor_interval = 0  # no thread
    torch.manual_seed(0)
    names = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokenizer = transformers.CLIPTokenizer(
        vocab={name: index for index, name in enumerate(names)}, merges=[], model_max_length=16
    )
    text = transformers.CLIPTextConfig(
        vocab_size=len(names), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    network = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pixels = diffusers.AutoencoderKL(
        block_out_channels=(4, 8), norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=pixels, unet=network, text_encoder=transformers.CLIPTextModel(text), tokenizer=tokenizer,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("diffusion") / "painter"
    pipeline.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[openai.OpenAI]:
    with (
        running_server(directory, exit_on_error=True) as server,
        openai.OpenAI(base_url=f"http://{server.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def pictures(client: openai.OpenAI, **details: Any) -> list[Any]:
    answer = client.images.generate(model="painter", prompt="a cat", **details)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each.b64_json or "")))) for each in answer.data or ()]


def test_pictures_are_those_of_the_library(client: openai.OpenAI, directory: Path) -> None:
    first, second = pictures(client, n=2, extra_body={"seed": 3, "steps": 2, "guidance": 2.5, "negative_prompt": "dog"})
    pipeline = diffusers.DiffusionPipeline.from_pretrained(directory, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for seed, picture in ((3, first), (4, second)):
        expected = pipeline(
            "a cat", negative_prompt="dog", num_inference_steps=2, guidance_scale=2.5,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]  # fmt: skip
        np.testing.assert_allclose(picture.astype(int), np.asarray(expected).astype(int), atol=1)
    assert (first != second).any()


def test_a_request_chooses_the_size(client: openai.OpenAI) -> None:
    (picture,) = pictures(client, size="32x16", extra_body={"steps": 1})
    assert picture.shape == (16, 32, 3)


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"size": "30x16"}, "divisible by 8"),
        ({"size": "4096x16"}, "'width' must be 1 to 1024"),
        ({"extra_body": {"steps": 0}}, "'steps' must be 1 to 100"),
        ({"quality": "low", "extra_body": {"style": "vivid"}}, "style"),
    ],
)
def test_what_the_pipeline_cannot_do_is_refused(client: openai.OpenAI, details: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        pictures(client, **details)


def test_a_broken_directory_and_code_are_refused(directory: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(directory, model / "1")
    assert backend_for_model_files(model / "1") == "diffusers"
    backend = find_backend("diffusers")
    (model / "1" / "unet" / "config.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match="diffusers cannot load"):
        loaded(backend, context_of(model)).create_instance(Placement("model_0"))
    (model / "1" / "unet" / "unet.py").write_text("raise SystemExit")
    with pytest.raises(InvalidArgumentError, match=r"unet\.py is code that comes with the checkpoint"):
        loaded(backend, context_of(model))
    (model / "1" / "model_index.json").write_text(json.dumps([]))
    with pytest.raises(InvalidArgumentError, match="expected a JSON object with _class_name"):
        loaded(backend, context_of(model))
