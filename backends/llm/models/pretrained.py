"""Checkpoints as transformers loads them, with errors that name the directory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint

# While transformers builds a network, its classes tie no weights and torch's default datatype is the network's: for the
# whole process, and put back as it was found. Of two loads at a time the second would find what the first has changed,
# and put that back for good; checkpoints with tied weights would be filled with random ones from then on.
_loading = Lock()


def load_pretrained(
    loader: Any,
    checkpoint: Checkpoint,
    model_type: str,
    *,
    unused: str | tuple[str, ...] = "",
    within: AbstractContextManager[None] | None = None,
    **options: Any,
) -> Any:
    """Load a checkpoint by `loader`, one of transformers' Auto classes. The checkpoint's own code is not run.

    transformers reads a directory itself. Of a GGUF file it gets the config and the tensors, in `dtype`.
    Called from any thread; loads wait for one another. Weights whose names begin with (one of) `unused` may be missing,
    or have another shape where `options` let them. The load runs `within` a context, which no other load shares.
    UnsupportedError for what transformers does not know, InvalidArgumentError for files that are damaged and weights
    that are missing.
    """
    from transformers.utils import logging

    place = checkpoint.place
    checkpoint.names()  # so that files which are damaged are refused in our words, before transformers maps them
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a server's log is not a terminal
    try:
        with _loading, within or nullcontext():
            if place.is_file():
                model, found = _load_tensors(loader, checkpoint, model_type, **options)
            else:
                model, found = loader.from_pretrained(
                    checkpoint.transformers_directory,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                    **options,
                )
    except (ValueError, ImportError) as error:
        # The first sentence: what follows is how to install another version, over several lines.
        raise UnsupportedError(
            f"transformers does not run the {model_type} in {place}: {str(error).splitlines()[0]}"
        ) from None
    except (OSError, RuntimeError) as error:
        raise InvalidArgumentError(f"transformers cannot load the {model_type} in {place}: {error}") from None
    # transformers draws them at random, and the model would write nonsense.
    named = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    missing = sorted(name for name in named if not (unused and name.startswith(unused)))
    if missing:
        raise InvalidArgumentError(
            f"the {model_type} in {place} lacks {len(missing)} of its weights: {', '.join(missing[:5])}"
        )
    return model


def _load_tensors(loader: Any, checkpoint: Checkpoint, model_type: str, *, dtype: Any, **_options: Any) -> Any:
    import torch
    from transformers import AutoConfig

    left_out = ("model_type", "quantization_config", "dtype")
    entries = {name: value for name, value in checkpoint.config.items() if name not in left_out}
    config = AutoConfig.for_model(model_type, **entries)
    with torch.device("meta"):
        network = type(loader.from_config(config))
    tensors = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}
    return network.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True)
