"""A tiny random Whisper with windows of 2 seconds, as a directory of Hugging Face."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import tqdm
from tokenizers import pre_tokenizers

RATE = 16_000
WINDOW_S = 2
LANGUAGES = ("en", "de", "fr")
_SPECIALS = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


def write_whisper(directory: Path, *, is_multilingual: bool = True) -> None:
    """The network, its tokenizer of single bytes, and its settings. Only a multilingual one can find words in sound."""
    import transformers

    tqdm.tqdm.monitor_interval = 0  # no thread
    torch.manual_seed(0)
    times = [f"<|{number * 0.02:.2f}|>" for number in range(WINDOW_S * 50 + 1)]
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer: Any = transformers.WhisperTokenizer(vocab=letters, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIALS)})
    tokenizer.add_tokens([transformers.AddedToken(time, special=False) for time in times])
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIALS}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_source_positions=WINDOW_S * 50, max_target_positions=24, pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"], suppress_tokens=[], begin_suppress_tokens=None,
    )  # fmt: skip
    model: Any = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # decided answers
    settings: dict[str, Any] = {
        "is_multilingual": is_multilingual,
        "max_length": 24,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [ids[name] for name in _SPECIALS[1:]],
        **{f"{name}_token_id": ids["<|endoftext|>"] for name in ("pad", "bos", "eos")},
        "decoder_start_token_id": ids["<|startoftranscript|>"],
    }
    if is_multilingual:
        settings["alignment_heads"] = [[0, 0], [0, 1]]
        settings["lang_to_id"] = {f"<|{name}|>": ids[f"<|{name}|>"] for name in LANGUAGES}
        settings["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
    model.generation_config = transformers.GenerationConfig(**settings)
    model.save_pretrained(directory)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(directory)


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Tones that change, float32 in [-1, 1] at 16 kHz."""
    times = np.arange(int(seconds * RATE)) / RATE
    random = np.random.default_rng(seed)
    tones = sum(np.sin(2 * np.pi * random.uniform(100, 4000) * times + random.uniform(0, 6)) for _ in range(4))
    return (tones * 0.2 * (0.3 + np.abs(np.sin(times * (1 + seed))))).astype(np.float32)


def sound_file(samples: np.ndarray[Any, Any], kind: str = "WAV", rate: int = RATE) -> bytes:
    """A file of `kind`: WAV, FLAC, OGG or MP3."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()
