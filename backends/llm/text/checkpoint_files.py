"""The JSON files of a checkpoint directory that say something about its text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError

# The tokens that have a name, as transformers calls them.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no such file."""
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, and of special_tokens_map.json where the first has none.

    Either a string or the description of an added token with a "content".
    """
    named: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or special_tokens_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def eos_ids(directory: Path) -> frozenset[int]:
    """The ids that end a text by generation_config.json, or by config.json where that has none."""
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(one for one in ids if isinstance(one, int) and not isinstance(one, bool))
        if found:
            return found
    return frozenset()


def chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The directory's chat templates by name; files of their own go before tokenizer_config.json."""
    named: dict[str, str] = {}
    lone = read_json_object(directory / "chat_template.json").get("chat_template")
    for value in (config.get("chat_template"), lone):
        if isinstance(value, str):
            named["default"] = value
        elif isinstance(value, list):
            named.update({one["name"]: one["template"] for one in value if isinstance(one, dict)})
        elif isinstance(value, dict):
            named.update(value)
    if (directory / "chat_template.jinja").is_file():
        named = {"default": (directory / "chat_template.jinja").read_text(encoding="utf-8")}
    if (directory / "additional_chat_templates").is_dir():
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = path.read_text(encoding="utf-8")
    return named
