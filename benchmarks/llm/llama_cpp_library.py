"""llama.cpp's own library, called by its C functions: the peer of `benchmarks.llm.llama_cpp`.

The library is the one that node-llama-cpp ships prebuilt, for each kind of processor; its declarations are read from a
package for Python. Both are of about the same day, and none of them has anything to be built:

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    pip install cffi && pip install --no-deps llama-cpp-py-sync==0.11739
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_DECLARATIONS = re.compile(r'_LLAMA_H_CDEF\s*=\s*r?("""|\'\'\')(.*?)\1', re.DOTALL)
# Of a later day than the library.
_NOT_THERE = "    size_t moe_cache_size;\n"
_BATCH = 2048
FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15, "F16": 1, "BF16": 32}


class PeerMissingError(Exception):
    """The peer is not installed; the message says how to install it."""


class LlamaCpp:
    """The library in `package`, which is what `npm pack` gives."""

    def __init__(self, package: Path) -> None:
        place = package / "bins" / "linux-x64"
        if not (place / "libllama.v0.5.0.so").exists():
            raise PeerMissingError(f"{place} has no libllama.v0.5.0.so.\n\n{__doc__}")
        declared = importlib.util.find_spec("llama_cpp_py_sync")
        if declared is None or not declared.submodule_search_locations or not importlib.util.find_spec("cffi"):
            raise PeerMissingError(f"cffi or llama-cpp-py-sync is not installed.\n\n{__doc__}")
        from cffi import FFI

        source = (Path(declared.submodule_search_locations[0]) / "_cffi_bindings.py").read_text()
        found = _DECLARATIONS.search(source)
        assert found is not None, "llama-cpp-py-sync has other files than 0.11739"
        self._ffi: Any = FFI()
        self._ffi.cdef(found[2].replace(_NOT_THERE, ""))
        for name in ("libggml-base.so", "libggml.v0.5.0.so"):
            ggml = ctypes.CDLL(str(place / name), mode=ctypes.RTLD_GLOBAL)
        ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        ggml.ggml_backend_load_all_from_path(str(place).encode())
        self._library: Any = self._ffi.dlopen(str(place / "libllama.v0.5.0.so"))
        self._library.llama_backend_init()

    @property
    def instructions(self) -> str:
        return str(self._ffi.string(self._library.llama_print_system_info()).decode())

    def quantize(self, source: Path, target: Path, file_type: str) -> None:
        parameters = self._library.llama_model_quantize_default_params()
        parameters.ftype = FILE_TYPES[file_type]
        parameters.nthread = 2
        status = self._library.llama_model_quantize(
            str(source).encode(), str(target).encode(), self._ffi.addressof(parameters)
        )
        assert status == 0, f"llama.cpp made no {file_type} of {source}"

    def load(self, path: Path, num_threads: int) -> LlamaCppModel:
        return LlamaCppModel(self._library, self._ffi, path, num_threads)


class LlamaCppModel:
    """Generates greedily, whatever ends a text; all streams of a call run at once, batched by step."""

    def __init__(self, library: Any, ffi: Any, path: Path, num_threads: int) -> None:
        self._library, self._ffi, self._num_threads = library, ffi, num_threads
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        assert self._model != ffi.NULL, f"llama.cpp does not load {path}"
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(_BATCH, 0, 1)
        self._context: Any = None
        self._num_streams = 0

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """The tokens of each stream, until stream i has `lengths[i]`."""
        self._open(len(prompts))
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        positions, tokens = [0] * len(prompts), [-1] * len(prompts)
        left = list(lengths)
        found: list[list[int]] = [[] for _ in prompts]
        while any(left):
            outputs = self._fill(prompts, positions, tokens, left)
            status = self._library.llama_decode(self._context, self._batch)
            assert status == 0, f"llama_decode answers {status}"
            for stream, row in outputs:
                logits = self._library.llama_get_logits_ith(self._context, row)
                tokens[stream] = int(np.frombuffer(self._ffi.buffer(logits, 4 * self._vocab_size), np.float32).argmax())
                found[stream].append(tokens[stream])
                left[stream] -= 1
        return found

    def _open(self, num_streams: int) -> None:
        """A context for as many streams, unless the last one was."""
        if self._num_streams == num_streams:
            return
        if self._context is not None:
            self._library.llama_free(self._context)
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx = 2048 if num_streams == 1 else 256 * num_streams
        parameters.n_batch = _BATCH
        parameters.n_ubatch = 512
        parameters.n_seq_max = num_streams
        parameters.n_threads = parameters.n_threads_batch = self._num_threads
        self._context = self._library.llama_init_from_model(self._model, parameters)
        assert self._context != self._ffi.NULL, "llama.cpp makes no context"
        self._num_streams = num_streams

    def _fill(
        self, prompts: Sequence[Sequence[int]], positions: list[int], tokens: list[int], left: list[int]
    ) -> list[tuple[int, int]]:
        """The next step: streams that have begun, then prompts as far as there is room. Which rows give tokens."""
        outputs: list[tuple[int, int]] = []
        row = 0
        for is_begun in (True, False):
            for stream, prompt in enumerate(prompts):
                if not left[stream] or (tokens[stream] >= 0) is not is_begun:
                    continue
                count = 1 if is_begun else min(len(prompt) - positions[stream], _BATCH - row)
                for _ in range(count):
                    position = positions[stream]
                    is_last = is_begun or position == len(prompt) - 1
                    self._batch.token[row] = tokens[stream] if is_begun else prompt[position]
                    self._batch.pos[row] = position
                    self._batch.n_seq_id[row] = 1
                    self._batch.seq_id[row][0] = stream
                    self._batch.logits[row] = is_last
                    if is_last:
                        outputs.append((stream, row))
                    positions[stream] += 1
                    row += 1
        self._batch.n_tokens = row
        return outputs
