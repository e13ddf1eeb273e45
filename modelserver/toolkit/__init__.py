"""From a trained model to a fast served one: conversion, quantization, tuning. Every way ends in a model directory."""

from __future__ import annotations

import importlib
from types import ModuleType

from modelserver.errors import UnavailableError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`. Raises UnavailableError with the pip line when it, or something that it needs, is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise UnavailableError(
            f"{purpose} needs the library '{missing}', which is not installed: pip install 'modelserver-py[{extra}]'"
        ) from None
    except (ImportError, OSError, AttributeError) as error:
        raise UnavailableError(
            f"{purpose} needs the library '{module.partition('.')[0]}', which cannot be imported: {error}; "
            f"install it again: pip install --force-reinstall 'modelserver-py[{extra}]'"
        ) from error
