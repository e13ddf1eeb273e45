"""Reads and writes config.pbtxt: protobuf's text format, reporting every mistake at once with its position."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf import text_format

from modelserver.config.literal import Lines
from modelserver.config.locator import locate
from modelserver.config.message import config_from_message, config_to_message
from modelserver.config.problem import Locations, Problem, error_of
from modelserver.config.schema import ModelConfig
from modelserver.pb import model_config_pb2 as pb

# Far above any real config (a few kB); parsing takes time and memory in proportion.
MAX_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config and where its fields are in the text.

    `problems` are mistakes in the text that were skipped to read the config; `doubtful` are the paths of fields
    whose values are unreliable because of them.
    """

    config: ModelConfig
    locations: Locations
    problems: tuple[Problem, ...] = ()
    doubtful: frozenset[str] = frozenset()


def parse_pbtxt(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """Parse a model config; raises ConfigError with every problem. Does not check the meaning of values."""
    parsed = read_pbtxt(text, source)
    if parsed.problems:
        raise error_of(parsed.problems, source)
    return parsed


def read_pbtxt(text: str, source: str = "config.pbtxt") -> ParsedConfig:
    """As `parse_pbtxt`, but reads past mistakes where it can; raises ConfigError where it cannot."""
    if len(text) > MAX_CHARACTERS:
        too_long = f"expected at most {MAX_CHARACTERS} characters, got {len(text)}"
        raise error_of([Problem(source, None, None, "", too_long)], source)
    text = text.removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line, column = Lines(text).position(error.start)
        raise error_of([Problem(source, line, column, "", "expected UTF-8 text")], source) from None
    locations, problems, repair = locate(text, pb.DESCRIPTOR.message_types_by_name["ModelConfig"], source)
    if problems and not repair.is_possible:
        raise error_of(problems, source)
    message = pb.ModelConfig()
    try:
        if problems:  # Merge takes a field twice: misspelt and spelt well
            text_format.Merge(repair.apply(text), message)
        else:
            text_format.Parse(text, message)
    except text_format.ParseError as error:
        if problems:
            raise error_of(problems, source) from None
        # The walk above accepts a little more than protobuf, whose parser decides.
        problem = Problem(source, error.GetLine(), error.GetColumn(), "", _reason(error))
        raise error_of([problem], source) from None
    config = config_from_message(message, source=source)
    return ParsedConfig(config, locations, tuple(problems), frozenset(repair.doubtful))


def _reason(error: text_format.ParseError) -> str:
    """The text of a parse error without its position."""
    line, column = error.GetLine(), error.GetColumn()
    return str(error).removeprefix(f"{line}:{column} : ")


def config_text(config: ModelConfig, *, comments: tuple[str, ...] = ()) -> str:
    """A config as text, with `comments` as lines in front. Raises ConfigError for values that no config can hold."""
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines()]
    text = text_format.MessageToString(config_to_message(config), as_utf8=True)
    return "\n".join([*lines, text]) if lines else text
