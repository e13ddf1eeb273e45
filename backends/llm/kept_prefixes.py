"""Prefixes that a model's options name: computed once, kept in files, and found there by every engine of the model."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelserver.backend import InvalidArgumentError

from .blocks import extend_hashes, root_hash
from .generation import GenerationRequest
from .kept_blocks import PrefixFiles
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .engine import Engine
    from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Another one where keys and values of the same tokens come out otherwise, or blocks are laid out otherwise.
_REVISION = "1"


def open_prefixes(engine: Engine, digest: bytes) -> PrefixFiles:
    """The files of all prefixes of the engine's options; those that are missing are computed and written.

    `digest` is the checkpoint's. Raises InvalidArgumentError, which names the prefix.
    """
    options, blocks = engine.options, engine.runner.blocks
    state = [_REVISION, repr(blocks.layout), str(blocks.block_size)]
    state += [str(options.quantization), options.attention_backend, str(options.max_model_len)]
    key = hashlib.blake2b(digest + "\n".join(state).encode(), digest_size=32).digest()
    files = PrefixFiles(blocks, _directory(options.kept_prefix_directory), key)
    adapter = engine.find_adapter(())
    root = root_hash("", b"" if adapter is None else adapter.digest)
    for name, prefix in options.kept_prefixes.items():
        token_ids = _token_ids(name, prefix, engine.tokenizer)
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, len(token_ids), blocks.block_size, root)
        if not hashes:
            raise InvalidArgumentError(
                f"kept_prefixes: {name} has {len(token_ids)} tokens; a prefix is kept in blocks of {blocks.block_size}"
            )
        if files.open(name, hashes):
            logger.info("the prefix %s, %d tokens, is kept", name, len(token_ids))
            continue
        try:
            engine.compute(GenerationRequest(token_ids, SamplingParams(max_tokens=1, temperature=0)))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"kept_prefixes: {name}: {error.message}") from None
        path = files.write(name, hashes, engine.blocks_of(hashes))
        files.open(name, hashes)
        logger.info("the prefix %s, %d tokens, was computed, and is kept in %s", name, len(token_ids), path)
    return files


def _directory(chosen: str | None) -> Path:
    if chosen is not None:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelserver" / "prefixes"


def _token_ids(name: str, prefix: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prefix, list):
        return prefix
    if tokenizer is None:
        raise InvalidArgumentError(f"kept_prefixes: {name} is text, and this model has no tokenizer: give token ids")
    if isinstance(prefix, str):
        return tokenizer.encode(prefix, True)
    try:
        text = tokenizer.apply_chat_template(prefix["messages"], tools=prefix.get("tools"), add_generation_prompt=False)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"kept_prefixes: {name}: {error.message}") from None
    return tokenizer.encode(text, tokenizer.begins_with_special_tokens(text))
