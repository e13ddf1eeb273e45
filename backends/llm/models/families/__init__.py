"""The families of decoders that run on our own network: those in this package, and those of installed packages."""

from __future__ import annotations

from ...extension_points import load_extension
from .bloom import Bloom
from .deepseek import DeepseekV2, DeepseekV3, Glm4Moe, Glm4MoeLite, KimiK2, Youtu
from .falcon import Falcon
from .family import Family
from .gemma import Gemma, Gemma2, Gemma3
from .gpt2 import Gpt2
from .gpt_neo import GptNeo
from .llama import Llama, Mistral, Mixtral, Phi3
from .mpt import Mpt
from .olmo import Olmo2, Olmo3
from .qwen import Mimo, Qwen2, Qwen2Moe, Qwen2Vl, Qwen3, Qwen3Moe, Qwen3Vl, Qwen25Vl

# The name of an entry point in this group is a `model_type`, and its object a class like `Family`.
ENTRY_POINT_GROUP = "modelserver.llm.families"

_BUNDLED: dict[str, type[Family]] = {
    family.model_type: family
    for family in (
        Llama,
        Mistral,
        Phi3,
        Mixtral,
        Qwen2,
        Mimo,
        Qwen2Vl,
        Qwen25Vl,
        Qwen3,
        Qwen3Vl,
        Qwen2Moe,
        Qwen3Moe,
        Gemma,
        Gemma2,
        Gemma3,
        Olmo2,
        Olmo3,
        Gpt2,
        GptNeo,
        Bloom,
        Falcon,
        Mpt,
        DeepseekV2,
        DeepseekV3,
        KimiK2,
        Glm4Moe,
        Glm4MoeLite,
        Youtu,
    )
}


def find_family(model_type: str) -> Family | None:
    """The family of a `model_type`; None for one that only transformers may know.

    Raises UnavailableError for an installed one that cannot be imported.
    """
    family = _BUNDLED.get(model_type) or load_extension(ENTRY_POINT_GROUP, model_type)
    return None if family is None else family()
