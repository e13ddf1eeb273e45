"""The parameter `instance_in_process`: whether each instance runs in its own process."""

from __future__ import annotations

from modelserver.config.problem import key_path
from modelserver.config.report import Report
from modelserver.config.schema import ModelConfig
from modelserver.config.suggestion import did_you_mean, suggest

INSTANCE_IN_PROCESS = "instance_in_process"
_WORDS = {"true": True, "false": False}


def instance_in_process(config: ModelConfig) -> bool | None:
    """The value in a valid config; None if it is not set."""
    return _WORDS.get(config.parameters.get(INSTANCE_IN_PROCESS, ""))


def check_instance_process(config: ModelConfig, report: Report) -> None:
    """Report an unknown value of the parameter."""
    word = config.parameters.get(INSTANCE_IN_PROCESS)
    if word is not None and word not in _WORDS:
        hint = did_you_mean(suggest(word, _WORDS))
        report.add(key_path("parameters", INSTANCE_IN_PROCESS), f"expected true or false, got '{word:.40}'", hint)
