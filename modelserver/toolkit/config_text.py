"""A model config as the text of a config.pbtxt."""

from __future__ import annotations

from google.protobuf import text_format

from modelserver.config.message import config_to_message
from modelserver.config.schema import ModelConfig


def config_text(config: ModelConfig, *, comments: tuple[str, ...] = ()) -> str:
    """The text, with `comments` as lines in front. Raises ConfigError for values that no config can hold."""
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines()]
    text = text_format.MessageToString(config_to_message(config), as_utf8=True)
    return "\n".join([*lines, text]) if lines else text
