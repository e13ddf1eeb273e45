"""Files of sound as samples: WAV, FLAC, Ogg (Vorbis, Opus) and MP3, of one channel at the rate of a model."""

from __future__ import annotations

import importlib
import io
import math
from typing import Any

import numpy as np

from modelserver.backend import Array, InvalidArgumentError

# The libraries that read and resample, of the extra `audio`.
LIBRARIES = ("soundfile", "scipy.signal")
# How the files of the kinds begin that are offered; the library would read rarer ones.
_BEGINNINGS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3", b"\xff")
_BLOCK_SAMPLES = 1 << 20
# Filters between rates outside of these would take much memory.
_MIN_RATE, _MAX_RATE = 1_000, 384_000


def read_sound(data: bytes, rate: int, max_seconds: float) -> Array:
    """The samples of a file, float32 in [-1, 1], at `rate` per second; channels are averaged.

    Raises InvalidArgumentError for a file that is broken, of another kind, without sound, or longer than `max_seconds`.
    """
    if not data:
        raise InvalidArgumentError("input 'audio': the file is empty")
    if not data.startswith(_BEGINNINGS):
        raise InvalidArgumentError("input 'audio': expected a file of sound (WAV, FLAC, Ogg or MP3)")
    soundfile: Any = importlib.import_module("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            given_rate = file.samplerate
            blocks = _blocks(file, max_seconds)
    except (soundfile.SoundFileError, TypeError) as error:
        raise InvalidArgumentError(f"input 'audio': the file of sound cannot be read: {str(error)[:200]}") from error
    if not blocks:
        raise InvalidArgumentError("input 'audio': the file has no sound")
    samples = np.concatenate(blocks)
    if not np.isfinite(samples).all():
        raise InvalidArgumentError("input 'audio': the samples are not finite numbers")
    if given_rate == rate:
        return samples
    common = math.gcd(given_rate, rate)
    signal: Any = importlib.import_module("scipy.signal")
    found: Array = signal.resample_poly(samples, rate // common, given_rate // common).astype(np.float32)
    return found


def _blocks(file: Any, max_seconds: float) -> list[Array]:
    """The averaged samples. A header may lie about their number, so reading stops at the limit."""
    if not _MIN_RATE <= file.samplerate <= _MAX_RATE:
        raise InvalidArgumentError(
            f"input 'audio': the sound has {file.samplerate} samples per second, "
            f"expected from {_MIN_RATE} to {_MAX_RATE}"
        )
    blocks: list[Array] = []
    room = int(max_seconds * file.samplerate)
    while len(block := file.read(max(1, _BLOCK_SAMPLES // file.channels), dtype="float32", always_2d=True)):
        room -= len(block)
        if room < 0:
            raise InvalidArgumentError(f"input 'audio': the sound is longer than {max_seconds:g} seconds")
        blocks.append(block.mean(axis=1, dtype=np.float32))
    return blocks
