"""The imports of packages that add a family of models or a weight format: see docs/add-a-model-family.md and
docs/add-a-weight-format.md.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .models.build import DecoderBuilder
from .models.decoder import Block, Decoder, DecoderLayer
from .models.decoder_config import DecoderConfig, MoeConfig, Names
from .models.families.family import Family
from .models.families.readers import (
    Entries,
    base_config,
    layer_types,
    typed_windows,
    uniform_windows,
    with_ropes_by_type,
)
from .models.linear import DenseEmbedding, GroupedLinear, Linear, ListedLinears, TokenEmbedding, float_linear
from .models.linear_tensors import LinearTensors, Part, Rank, Split
from .models.norm import Norm
from .models.weights import Weights
from .quantization.quantized_linear import quantized_embedding, quantized_linear
from .quantization.quantized_weight import QuantizedWeight
from .quantization.scheme import Scheme
from .step_context import StepContext

__all__ = [
    "Block",
    "Checkpoint",
    "Decoder",
    "DecoderBuilder",
    "DecoderConfig",
    "DecoderLayer",
    "DenseEmbedding",
    "Entries",
    "Family",
    "GroupedLinear",
    "Linear",
    "LinearTensors",
    "ListedLinears",
    "MoeConfig",
    "Names",
    "Norm",
    "Part",
    "QuantizedWeight",
    "Rank",
    "Scheme",
    "Split",
    "StepContext",
    "TokenEmbedding",
    "Weights",
    "base_config",
    "float_linear",
    "layer_types",
    "quantized_embedding",
    "quantized_linear",
    "typed_windows",
    "uniform_windows",
    "with_ropes_by_type",
]
