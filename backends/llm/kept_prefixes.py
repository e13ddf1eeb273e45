"""Prefixes that a model's options name: computed once, kept in files, and found there by every engine of the model."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError

from .attention.kv_blocks import KvBlocks
from .blocks import extend_hashes
from .kept_blocks import PrefixFiles
from .options import EngineOptions
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Another one where keys and values of the same tokens come out otherwise, or blocks are laid out otherwise.
_REVISION = "1"


def open_prefixes(
    options: EngineOptions,
    blocks: KvBlocks,
    tokenizer: Tokenizer | None,
    digest: bytes,
    root: bytes,
    compute: Callable[[list[int], list[bytes]], list[int]],
) -> PrefixFiles:
    """The files of all prefixes of the options; those that are missing are computed and written.

    `digest` is the checkpoint's, and `root` the hash before the first block. `compute` is given tokens and the hashes
    of their blocks, and returns the blocks. Raises InvalidArgumentError, which names the prefix.
    """
    state = [_REVISION, repr(blocks.layout), str(blocks.block_size)]
    state += [str(options.quantization), options.attention_backend, str(options.max_model_len)]
    key = hashlib.blake2b(digest + "\n".join(state).encode(), digest_size=32).digest()
    files = PrefixFiles(blocks, _directory(options.kept_prefix_directory), key)
    for name, prefix in options.kept_prefixes.items():
        token_ids = _token_ids(name, prefix, tokenizer)
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
            held = compute(token_ids, hashes)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"kept_prefixes: {name}: {error.message}") from None
        path = files.write(name, hashes, held)
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
