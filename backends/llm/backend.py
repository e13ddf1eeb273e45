"""The llm backend: finds a checkpoint, completes its config, and makes an engine (or encoder) for each instance.

torch is imported when a model is loaded, not before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelserver.backend import (
    Backend,
    BackendContext,
    DeviceKind,
    InstanceGroupKind,
    InvalidArgumentError,
    ModelConfig,
    Placement,
    missing_package,
    sampling_of,
    visible_gpus,
)

from .checkpoint import open_checkpoint
from .checkpoint_place import (
    CONFIG_JSON,
    FILL_IN_MIDDLE,
    GGUF_FILES,
    MODEL_JSON,
    MODELFILE,
    CheckpointPlace,
    find_checkpoint,
    longest_of,
)
from .contract import Purpose, complete_config
from .nodes import LEADER, NNODES
from .pictures.families import sees_pictures
from .text.chat_template import tool_parser_of

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .embedding.instance import EncoderInstance
    from .embedding.text_model import TextModel
    from .engines import OtherEngine
    from .instance import LlmInstance
    from .options import EngineOptions

_LIBRARIES = frozenset({"torch", "tokenizers", "safetensors", "jinja2"})


class LlmBackend(Backend):
    """One version of a language model or an encoder. Each instance has weights of its own, and a KV cache."""

    model_filenames = (MODEL_JSON, CONFIG_JSON, GGUF_FILES, MODELFILE)
    extra = "llm"
    option_names = frozenset({NNODES, LEADER})
    supports_gpu = True
    completes_quickly = True
    prefix_inputs = ("messages", "text_input", "input_ids")

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        place = find_checkpoint(context)
        config = context.config
        if traits := _traits(place) | _adapter_traits(place):
            config = replace(config, parameters={**traits, **config.parameters})
        return complete_config(
            config,
            max_model_len=place.options.max_model_len or longest_of(place.checkpoint),
            purpose=place.purpose,
            labels=place.labels,
            sees_pictures=place.purpose is Purpose.GENERATE
            and place.engine is None
            and sees_pictures(place.checkpoint, tensor_parallel_size=place.options.tensor_parallel_size),
        )

    @classmethod
    def needs_process(cls, context: BackendContext) -> bool:
        """On a GPU: host work has an interpreter to itself there, and what breaks the device's context ends alone.
        With several ranks, too: when one leaves or hangs, the engine ends, and the server starts it anew.

        Other engines need an environment of their own.
        """
        place = find_checkpoint(context)
        if place.engine is not None or place.options.tensor_parallel_size > 1:
            return True
        device = place.options.device
        kinds = {group.kind for group in context.config.instance_group}
        if device != "auto" or kinds == {InstanceGroupKind.KIND_CPU}:
            return device.startswith("cuda")
        return InstanceGroupKind.KIND_GPU in kinds or bool(visible_gpus())

    @classmethod
    def quantize_version(
        cls, source: Path, target: Path, method: str, calibration: str | None, /
    ) -> tuple[Mapping[str, float], list[str]]:
        """As GGUF by its methods; by the others as compressed-tensors."""
        from .calibration import measured_importance
        from .gguf_copy import GGUF_METHODS, write_gguf_copy
        from .quantized_copy import METHODS, write_quantized_copy

        if method not in (*METHODS, *GGUF_METHODS):
            known = ", ".join((*METHODS, *GGUF_METHODS))
            raise InvalidArgumentError(f"quantization {method!r} of a language model: expected {known}")
        with open_checkpoint(source) as checkpoint:
            before = checkpoint.num_bytes
            if method in GGUF_METHODS:
                importance = None if calibration is None else measured_importance(checkpoint, calibration)
                copy = write_gguf_copy(checkpoint, target, method, importance)
                figures = {"tensors": copy.num_rounded, "bytes_before": before, "bytes_after": copy.num_bytes}
                return figures, copy.notes
            written = write_quantized_copy(checkpoint, target, method, calibration)
        notes = [f"{name} stays in floats: its inputs cannot be split into whole groups" for name in written.kept]
        figures = {"modules": written.num_rounded, "bytes_before": before, "bytes_after": written.num_bytes}
        return figures, notes

    @classmethod
    def convert_version(cls, source: Path, target: Path, form: str, /) -> tuple[Mapping[str, float], list[str]]:
        from .gguf_copy import write_gguf_copy, write_safetensors_copy

        with open_checkpoint(source) as checkpoint:
            before = checkpoint.num_bytes
            if form == "safetensors":
                return {"bytes_before": before, "bytes_after": write_safetensors_copy(checkpoint, target)}, []
            if form != "gguf":
                raise InvalidArgumentError(f"the form {form!r} of a language model: expected gguf or safetensors")
            copy = write_gguf_copy(checkpoint, target)
        return {"bytes_before": before, "bytes_after": copy.num_bytes}, copy.notes

    @classmethod
    def compare_versions(cls, source: Path, target: Path, text: str, /) -> Mapping[str, float]:
        from .quantized_copy import compare_on_text

        return asdict(compare_on_text(source, target, text))

    def load(self) -> None:
        self._place = find_checkpoint(self.context)

    def create_instance(self, placement: Placement) -> LlmInstance | EncoderInstance:
        if self._place.engine is not None:
            return self._other_engine(self._place.engine, placement)
        try:
            from .embedding.instance import EncoderInstance
            from .engine import Engine
            from .instance import LlmInstance
            from .kv_memory import sized_for
            from .models.load import choose_device
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in _LIBRARIES:
                raise
            raise missing_package(error.name, "llm", "backend 'llm'") from error
        options = self._place.options
        if options.device == "auto" and placement.kind is not DeviceKind.MODEL:
            device = f"cuda:{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
            options = replace(options, device=device)
        # Opened for each instance: they may be made by several threads.
        with open_checkpoint(self._place.checkpoint.place) as checkpoint:
            if self._place.purpose is not Purpose.GENERATE:
                options = sized_for(options, choose_device(options.device))
                return EncoderInstance(_load_text_model(checkpoint, self._place, options), options)
            engine = Engine.from_checkpoint(checkpoint, options)
        assert engine.tokenizer is not None, "an engine that was read from a checkpoint has a tokenizer"
        modelfile = self._place.modelfile
        if modelfile is None:
            return LlmInstance(engine, engine.tokenizer)
        engine.tokenizer.chat_templates = engine.tokenizer.chat_templates.with_conversation(
            ollama=self._place.template, system=modelfile.system or "", history=modelfile.messages
        )
        return LlmInstance(engine, engine.tokenizer, defaults=sampling_of(modelfile.parameters))

    def _other_engine(self, engine: OtherEngine, placement: Placement) -> LlmInstance:
        from .engines.library_engine import LibraryEngine
        from .instance import LlmInstance

        if placement.kind is DeviceKind.GPU:
            # Before its library is imported; in this process there is nothing but this instance.
            os.environ["CUDA_VISIBLE_DEVICES"] = str(placement.device_id)
        with open_checkpoint(self._place.checkpoint.place) as checkpoint:
            made = LibraryEngine.from_checkpoint(checkpoint, engine, self._place.options)
        return LlmInstance(made, made.tokenizer)


def _load_text_model(checkpoint: Checkpoint, place: CheckpointPlace, options: EngineOptions) -> TextModel:
    from .embedding.classifier import load_classifier
    from .embedding.encoder import Encoder

    if place.purpose is Purpose.EMBED:
        return Encoder.from_checkpoint(checkpoint, options)
    is_of_tokens = place.purpose is Purpose.CLASSIFY_TOKENS
    return load_classifier(checkpoint, options, labels=place.labels, is_of_tokens=is_of_tokens)


def _adapter_traits(place: CheckpointPlace) -> dict[str, str]:
    """Which adapters requests may name, as parameters of a config, which frontends read."""
    options = place.options
    if place.purpose is not Purpose.GENERATE or not options.serves_adapters:
        return {}
    modules = dict(options.lora_modules)
    return {"enable_lora": "true", **({"lora_modules": json.dumps(modules)} if modules else {})}


def _traits(place: CheckpointPlace) -> dict[str, str]:
    """What a Modelfile's template, or that of the checkpoint, says of its model, as parameters of a config."""
    if place.purpose is not Purpose.GENERATE:
        return {}
    if place.template is None:
        with suppress(InvalidArgumentError):  # the load says what is wrong with the files
            name = tool_parser_of(place.checkpoint.chat_templates.get("default", ""))
            return {"tool_parser": name} if name else {}
        return {}
    traits = place.template.traits
    found = {
        "tool_parser": traits.tool_parser,
        "reasoning_parser": traits.reasoning_parser,
        FILL_IN_MIDDLE: "template" if traits.has_suffix else "",
    }
    return {name: value for name, value in found.items() if value}
