"""Parses config.pbtxt: protobuf's text format, with every mistake reported at once and its place."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import text_format

from modelserver.config.lexer import Lines
from modelserver.config.locator import locate
from modelserver.config.message import config_from_message
from modelserver.config.problem import Locations, Problem, error_of
from modelserver.config.schema import ModelConfig
from modelserver.pb import model_config_pb2 as pb

# Far above any real config (a few kB); parsing takes time and memory in proportion.
MAX_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config and where its fields are in the text."""

    config: ModelConfig
    locations: Locations


def parse_pbtxt(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """Parse a model config; raises ConfigError with every problem. Says nothing about what values mean."""
    if len(text) > MAX_CHARACTERS:
        too_long = f"expected at most {MAX_CHARACTERS} characters, got {len(text)}"
        raise error_of([Problem(source, None, None, "", too_long)], source)
    text = text.removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line, column = Lines(text).position(error.start)
        raise error_of([Problem(source, line, column, "", "expected UTF-8 text")], source) from None
    locations, problems = locate(text, pb.DESCRIPTOR.message_types_by_name["ModelConfig"], source)
    if problems:
        raise error_of(problems, source)
    message = pb.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        # The walk above takes a little more than protobuf does; its word is final.
        problem = Problem(source, error.GetLine(), error.GetColumn(), "", _reason(error))
        raise error_of([problem], source) from None
    return ParsedConfig(config_from_message(message, source=source), locations)


def _reason(error: text_format.ParseError) -> str:
    """The text of a parse error without its position."""
    line, column = error.GetLine(), error.GetColumn()
    return str(error).removeprefix(f"{line}:{column} : ")
