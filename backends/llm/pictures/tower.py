"""The part of a checkpoint that sees: transformers' image processor and vision network, without its language model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint
from ..compute_thread import ComputeThread
from ..models.pretrained import load_pretrained
from .families import PictureFamily, picture_family
from .prompt import Picture

if TYPE_CHECKING:
    from PIL.Image import Image


class Tower:
    """Makes embeddings of pictures. Called from any thread, one at a time."""

    def __init__(
        self,
        network: Any,
        processor: Any,
        family: type[PictureFamily],
        entries: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.family = family
        self.entries = entries
        self.device = device
        self._network = network
        self._processor = processor
        self._parameters = frozenset(_names_of_parameters(network.get_image_features))
        # Half of the cores: a step that computes meanwhile would wait for a thread that waits for its turn.
        self._thread = ComputeThread(device, max(1, (os.cpu_count() or 1) // 2) if device.type == "cpu" else None)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def see(self, image: Image, digest: bytes, family: PictureFamily) -> Picture:
        """Raises InvalidArgumentError for a picture that the image processor refuses."""
        processed, embeddings, deepstack = self.compute(image, family.processor_options)
        return Picture(
            digest=digest,
            embeddings=embeddings,
            expansion=family.expansion(embeddings.shape[0], processed),
            grid=family.grid(processed),
            deepstack=deepstack,
        )

    def compute(
        self, image: Image, options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], torch.Tensor, tuple[torch.Tensor, ...]]:
        """What the image processor makes of a picture, its embeddings, and those of the first layers.

        Raises InvalidArgumentError for a picture that the image processor refuses.
        """
        try:
            processed: Mapping[str, Any] = self._processor(images=[image], return_tensors="pt", **options)
        except (ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
            raise InvalidArgumentError(f"the model cannot take a picture of {image.size} pixels: {error}") from None
        self._thread.settle()
        with torch.inference_mode():
            if self._stream is None:
                return processed, *self._embed(processed)
            with torch.cuda.stream(self._stream):
                embeddings, deepstack = self._embed(processed)
            self._stream.synchronize()
            for tensor in (embeddings, *deepstack):
                tensor.record_stream(torch.cuda.default_stream(self.device))
            return processed, embeddings, deepstack

    def _embed(self, processed: Mapping[str, Any]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        inputs = {
            name: value.to(self.device)
            for name, value in processed.items()
            if name in self._parameters and isinstance(value, torch.Tensor)
        }
        inputs["pixel_values"] = inputs["pixel_values"].to(self._network.dtype)
        features = self._network.get_image_features(**inputs)
        layers = getattr(features, "deepstack_features", None) or ()
        return _joined(features.pooler_output), tuple(map(_joined, layers))


def _joined(features: Any) -> torch.Tensor:
    """[rows, hidden_size] of what is a tensor of crops, or one tensor per picture."""
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _names_of_parameters(function: Any) -> list[str]:
    """Of a method that decorators of transformers wrap."""
    import inspect

    return list(inspect.signature(inspect.unwrap(function)).parameters)


def load_tower(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of a checkpoint that `sees_pictures`. Its language model is not read.

    Raises InvalidArgumentError for weights that are missing or damaged, UnsupportedError for what transformers does not
    know.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

    directory, model_type = checkpoint.transformers_directory, str(checkpoint.config["model_type"])
    family = picture_family(model_type)
    assert family is not None, "the checkpoint sees pictures"
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError, ImportError) as error:
        raise _unseeing(directory, model_type, error) from None
    entries = {**config.to_dict(), **checkpoint.config}
    _without_language_model(config)
    model = load_pretrained(
        AutoModelForImageTextToText,
        checkpoint,
        model_type,
        unused=("model.language_model.", "model.text_model.", "lm_head."),
        config=config,
        within=_quiet(),
        dtype=dtype,
        ignore_mismatched_sizes=True,
    )
    network = model.eval().to(device).model
    if not hasattr(network, "get_image_features"):
        raise _unseeing(directory, model_type, "its network has no get_image_features")
    return Tower(network, processor, family, entries, device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of the weights that are left out on purpose."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _without_language_model(config: Any) -> None:
    """Leave nothing but a layer of the language model, with a vocabulary of one: the engine has its own."""
    text = config.get_text_config()
    text.num_hidden_layers = 1
    text.vocab_size = 1
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:1]
    # Of the language model; towers are stored in floats.
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _unseeing(directory: Path, model_type: str, error: object) -> UnsupportedError:
    return UnsupportedError(f"transformers does not see with the {model_type} in {directory}: {str(error)[:300]}")
