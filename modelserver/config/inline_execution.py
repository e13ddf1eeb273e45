"""The parameter `inline_execution`: whether a model may be executed on the event loop itself."""

from __future__ import annotations

import enum

from modelserver.config.problem import key_path
from modelserver.config.report import Report
from modelserver.config.schema import ModelConfig
from modelserver.config.suggestion import did_you_mean, suggest

INLINE_EXECUTION = "inline_execution"


class InlineExecution(enum.Enum):
    """The values of the parameter; a config without it leaves the choice to the backend."""

    NEVER = "never"  # in worker threads, regardless of the backend
    ALWAYS = "always"  # on the event loop, however long it takes
    AUTO = "auto"  # on the event loop if it is measured to be fast, and as long as it is


def inline_execution(config: ModelConfig) -> InlineExecution | None:
    """The value in a valid config; None if it is not set."""
    word = config.parameters.get(INLINE_EXECUTION)
    return None if word is None else InlineExecution(word)


def check_inline_execution(config: ModelConfig, report: Report) -> None:
    """Report an unknown value of the parameter."""
    word = config.parameters.get(INLINE_EXECUTION)
    words = [choice.value for choice in InlineExecution]
    if word is not None and word not in words:
        hint = did_you_mean(suggest(word, words))
        report.add(
            key_path("parameters", INLINE_EXECUTION), f"expected one of {', '.join(words)}, got '{word:.40}'", hint
        )
