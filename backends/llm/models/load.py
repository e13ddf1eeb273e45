"""From a checkpoint to a network on its device, in its precision."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelserver.backend import InvalidArgumentError, UnavailableError, UnsupportedError

from ..attention.kv_blocks import KvLayout
from ..attention.paged import AttentionSpec
from ..checkpoint import Checkpoint, GgufCheckpoint, HfCheckpoint, UnreadGguf, open_checkpoint, text_config
from ..compute_thread import ComputeThread
from ..embedding.recognition import is_encoder
from ..kernels import AMPERE
from ..lora.adapter import Target
from ..lora.layers import AdaptedLayers
from ..options import EngineOptions
from ..pictures.families import sees_pictures
from ..pictures.tower import Tower, load_tower
from ..quantization import find_scheme, stored_method
from ..quantization.checking import CheckingScheme, UnreadCheckpoint, WalkingScheme
from ..quantization.kept import keeping
from ..quantization.scheme import Scheme
from ..quantization.stored import StoredScheme
from .build import DecoderBuilder
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .draft_head import DraftHead
from .families import find_family
from .families.family import Family
from .families.readers import stored_dtype
from .linear import can_pack, multiplies_bfloat16
from .linear_tensors import ALONE, Part, Rank
from .recurrent_states import RecurrentStates
from .transformers_head import load_prediction
from .transformers_model import TransformersNetwork, load_transformers
from .weights import StoredLayer, Weights

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
# Of a checkpoint that does not say how long its texts may become.
_USUAL_LEN = 2048


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A network and what the rest of the engine must know of it. `kv_layout` and `attention` are this rank's share."""

    network: Decoder | TransformersNetwork
    attention: AttentionSpec
    kv_layout: KvLayout
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    # Whether a step does the same whatever its values are.
    is_capturable: bool
    # The states of layers without attention.
    states: RecurrentStates | None = None
    # What layers take in memory, of networks of our own.
    layers: tuple[StoredLayer, ...] = ()
    # The part that sees pictures.
    tower: Tower | None = None
    # Where adapters are served: the layers that they may add to, and the network as they must fit it.
    adapted: AdaptedLayers | None = None
    target: Target | None = None
    # The checkpoint's layer for multi-token prediction, where it guesses tokens.
    draft_head: DraftHead | None = None


def load_network(
    checkpoint: Checkpoint, options: EngineOptions, rank: Rank = ALONE, scheme: Scheme | None = None
) -> LoadedNetwork:
    """Raises InvalidArgumentError or UnsupportedError if the checkpoint or the options do not fit.

    `scheme` makes the layers; without it, the one that the checkpoint and the options name.
    """
    entries = text_config(checkpoint)
    if is_encoder(entries, checkpoint):
        raise UnsupportedError(
            f"{checkpoint.place} holds an encoder ({entries['model_type']}): it makes embeddings, at /v1/embeddings of "
            "a server, and generates nothing"
        )
    family = find_family(entries["model_type"])
    if family is None:
        return load_with_transformers(checkpoint, options)
    config = family.config_of(checkpoint)
    if config.slopes is not None and options.kv_cache_dtype != "auto":
        raise UnsupportedError(
            f"kv_cache_dtype {options.kv_cache_dtype} is not supported for {config.model_type} with ALiBi, whose keys "
            "have their positions beside them: 8 bits would round those; use auto"
        )
    device = choose_device(options.device)
    ComputeThread(device, None).settle()  # schemes try kernels out
    scheme, names = scheme or find_scheme(options.quantization, {**checkpoint.config, **entries}), family.names
    dtype = choose_dtype(options.dtype, config.dtype, device, has_codes=scheme.has_codes)
    max_model_len = choose_max_model_len(options.max_model_len, config.max_position_embeddings, config.longest)
    # The first rank guesses for all.
    predicts = options.speculative_config is not None and options.speculative_config.method == "mtp" and not rank.index
    with torch.inference_mode():
        kept = keeping(checkpoint, scheme, options, dtype, device, rank)
        if kept is None or not kept.is_read:  # what was kept was checked before
            check_layers(checkpoint, scheme, family, config, rank)
        adapted = None
        if options.serves_adapters:
            adapted = AdaptedLayers(device, num_slots=options.num_lora_slots, max_rank=options.lora_rank)
        weights = Weights(
            checkpoint,
            kept or scheme,
            dtype=dtype,
            device=device,
            rank=rank,
            is_transposed=names.is_transposed,
            adapted=adapted,
        )
        build = DecoderBuilder(config, names, weights)
        network = family.network(build, max_len=max_model_len)
        draft_head = None
        if predicts:
            if rank.size > 1:
                whole = Weights(checkpoint, scheme, dtype=dtype, device=device, is_transposed=names.is_transposed)
                build = DecoderBuilder(config, names, whole)
            draft_head = family.draft_head(build, network, max_len=max_model_len)
    if kept is not None:
        kept.keep(checkpoint)
    _log_layers(checkpoint, weights.layers)
    return LoadedNetwork(
        network,
        attention_spec(config, rank),
        kept_layout(family.kv_layout(config, dtype, num_ranks=rank.size), options),
        device,
        config.vocab_size,
        max_model_len,
        config.eos_token_ids,
        is_capturable=weights.is_capturable,
        layers=tuple(weights.layers),
        tower=load_tower(checkpoint, dtype=dtype, device=device)
        if sees_pictures(checkpoint, tensor_parallel_size=rank.size)
        else None,
        adapted=adapted,
        target=None if adapted is None else _target(checkpoint, config, adapted, weights, options),
        draft_head=draft_head,
    )


def _target(
    checkpoint: Checkpoint, config: DecoderConfig, adapted: AdaptedLayers, weights: Weights, options: EngineOptions
) -> Target:
    """`checkpoint` is opened again where a module's weight is needed."""

    def weight(part: Part) -> torch.Tensor:
        with open_checkpoint(checkpoint.place) as opened:
            name = f"{part.name}.weight"
            if name not in opened:
                raise UnsupportedError(
                    f"use_dora needs the module {part.name} in floats or as GGUF, and {checkpoint.place} has it in "
                    "another form: merge the adapter"
                )
            found = opened.tensor(name)
            return found.t() if weights.is_transposed else found

    return Target(
        modules=adapted.modules,
        max_rank=options.lora_rank,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kind=config.model_type,
        weight=weight,
    )


def attention_spec(config: DecoderConfig, rank: Rank = ALONE) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads // rank.size,
        windows=config.windows,
        scale=config.attention_scale,
        softcap=config.attention_softcap,
    )


def _log_layers(checkpoint: Checkpoint, layers: Sequence[StoredLayer]) -> None:
    """In which forms they are, and in which of these each kind of layer is."""
    forms: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    for layer in layers:
        forms[layer.form] += layer.num_bytes
        kinds.setdefault(layer.kind, Counter())[layer.form] += layer.num_bytes
    logger.info("linear layers of %s: %s", checkpoint.place, _shown(forms))
    for kind, found in kinds.items():
        logger.info("linear layers of %s: %s: %s", checkpoint.place, kind, _shown(found))


def _shown(forms: Counter[str]) -> str:
    return ", ".join(f"{form} {count / 1e6:.1f} MB" for form, count in forms.most_common())


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raises as a load would for a layer of our own decoders that is missing, wrong, or in an unknown format."""
    entries = text_config(checkpoint)
    family = None if is_encoder(entries, checkpoint) else find_family(entries["model_type"])
    if family is not None:
        scheme = find_scheme(None, {**checkpoint.config, **entries})
        with torch.inference_mode():
            check_layers(checkpoint, scheme, family, family.config_of(checkpoint))


def check_layers(
    checkpoint: Checkpoint, scheme: Scheme, family: Family, config: DecoderConfig, rank: Rank = ALONE
) -> None:
    """InvalidArgumentError or UnsupportedError for a tensor that is missing or wrong, in floats or a format of ours.

    Nothing but small tensors is read for it.
    """
    stored = scheme if isinstance(scheme, StoredScheme) else None
    if stored is None and stored_method(checkpoint.config) is not None:
        return  # of a scheme of an installed package
    if isinstance(checkpoint, GgufCheckpoint):
        walk(checkpoint, CheckingScheme(stored, UnreadGguf(checkpoint)), family, config, rank)
    elif type(checkpoint) is HfCheckpoint:  # a class that derives from it may have its tensors from elsewhere
        with UnreadCheckpoint(checkpoint.place) as unread:
            walk(checkpoint, CheckingScheme(stored, unread), family, config, rank)


def walk(checkpoint: Checkpoint, scheme: WalkingScheme, family: Family, config: DecoderConfig, rank: Rank) -> None:
    """Show a scheme each layer of a network, and build none."""
    weights = Weights(
        checkpoint,
        scheme,
        dtype=torch.float32,
        device=torch.device("cpu"),
        rank=rank,
        is_transposed=family.names.is_transposed,
    )
    family.network(DecoderBuilder(config, family.names, weights), max_len=1)


def load_with_transformers(checkpoint: Checkpoint, options: EngineOptions) -> LoadedNetwork:
    """The same on a network of transformers' own. UnsupportedError where it or an option does not go with that."""
    entries = text_config(checkpoint)
    # A model that also takes images describes its language model inside its config.
    if isinstance(nested := entries.get("text_config"), dict):
        entries = {**nested, **entries}
    if options.quantization is not None or options.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"quantization and tensor_parallel_size are not supported for {entries['model_type']}, "
            "which runs on transformers' network"
        )
    if options.serves_adapters:
        raise UnsupportedError(
            f"adapters are not supported for {entries['model_type']}, which runs on transformers' network: merge them "
            "into the weights, or set enable_lora to false"
        )
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, stored_dtype(entries), device)
    loaded = load_transformers(checkpoint, entries, dtype=dtype, device=device)
    config = options.speculative_config
    usual = int(entries.get("max_position_embeddings") or entries.get("model_max_length") or _USUAL_LEN)
    # Without attention, the length is not limited by positions.
    longest = usual if loaded.attention.windows else max(usual, options.max_model_len or 0)
    max_model_len = choose_max_model_len(options.max_model_len, usual, longest)
    draft_head = None
    if config is not None and config.method == "mtp":
        with torch.inference_mode():
            draft_head = load_prediction(checkpoint, loaded.network, max_len=max_model_len)
    return LoadedNetwork(
        loaded.network,
        loaded.attention,
        kept_layout(loaded.kv_layout, options),
        device,
        loaded.vocab_size,
        max_model_len,
        checkpoint.eos_token_ids,
        is_capturable=False,
        states=loaded.network.states,
        draft_head=draft_head,
    )


def kept_layout(layout: KvLayout, options: EngineOptions) -> KvLayout:
    """`layout` as `kv_cache_dtype` has it. UnsupportedError for heads that are not kept so."""
    if options.kv_cache_dtype == "auto" or not any(group.layers for group in layout.groups):
        return layout
    return layout.coded(torch.int8 if options.kv_cache_dtype.startswith("int8") else torch.float8_e4m3fn)


def choose_device(asked: str) -> torch.device:
    """ "auto" is the GPU if there is one. UnavailableError if the one asked for is not there."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise InvalidArgumentError(f"device {asked!r} is not a device: expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"device {asked!r} was asked for, but torch finds no GPU")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_dtype(asked: str, stored: str, device: torch.device, *, has_codes: bool = False) -> torch.dtype:
    """ "auto" is what the checkpoint says, but on a CPU float32 where that multiplies no slower than half precision.

    `has_codes`: that of the scheme. Products of codes take and give float32, so half precision between them saves no
    time (measured on AVX-512: without it a token of Qwen3-0.6B in Q4_K_M takes 0.90x, 8 at a time 0.94x, a prompt
    1.05x). A CPU that cannot multiply bfloat16 at all computes in float32, and a GPU in float16, with a warning.
    """
    name = (stored if asked == "auto" else asked).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidArgumentError(f"dtype {name!r} is not supported: expected auto, {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    if asked != "auto" and dtype == torch.bfloat16 and device.type == "cpu" and not can_pack(dtype):
        logger.warning("dtype bfloat16 is computed in float32: this processor has no instructions for it")
        return torch.float32
    if dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_properties(device).major < AMPERE:
        logger.warning("dtype bfloat16 is computed in float16: this GPU has no instructions for it")
        return torch.float16
    if asked != "auto" or device.type != "cpu" or dtype == torch.float32:
        return dtype
    is_faster = dtype == torch.bfloat16 and multiplies_bfloat16() and not has_codes
    return dtype if is_faster else torch.float32


def choose_max_model_len(asked: int | None, usual: int, longest: int) -> int:
    """As long as the network's positions usually go. InvalidArgumentError if more is asked for than there can be."""
    if asked is None:
        return usual
    if asked > longest:
        raise InvalidArgumentError(
            f"max_model_len {asked} is more than the {longest} positions that the checkpoint was made for"
        )
    return asked
