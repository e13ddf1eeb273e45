"""The steps after the network in the files of sentence-transformers: pooling, dense layers, prompts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint
from ..json_fields import quote
from .recognition import MODULES_JSON

# Ways of pooling, in the order in which the vectors of several are joined; and the other names that they go by.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
_ALIASES = {
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weighted_mean": "weightedmean",
    "lasttoken": "last",
    "last_token": "last",
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "weightedmean_tokens": "weightedmean",
}
# Modules that do nothing at inference.
_WITHOUT_EFFECT = frozenset({"Dropout"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLayout:
    """`pooling` of hidden states to one vector (several are joined), then the dense layers that lie in `dense`.

    `is_normalised`: vectors have length 1 in the end. `prompts` by name stand before a text.
    """

    pooling: tuple[str, ...]
    dense: tuple[str, ...] = ()
    is_normalised: bool = True
    is_lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    is_prompt_pooled: bool = True

    def prompt(self, name: str | None) -> str:
        """The prefix of each text: the prompt of that name, or else the checkpoint's default.

        InvalidArgumentError for a name that there is not, UnsupportedError where a prompt is left out of pooling.
        """
        name = name or self.default_prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidArgumentError(f"default_prompt_name {quote(name)}: this checkpoint has the prompts {known}")
        if self.prompts[name] and not self.is_prompt_pooled:
            raise UnsupportedError(f"default_prompt_name {quote(name)}: include_prompt false is not supported")
        return self.prompts[name]


def pooling_of(name: str) -> str | None:
    """The way of pooling that goes by this name, in whatever spelling (`CLS`, `last-token`); None for none."""
    plain = name.lower().replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in POOLINGS else None


def read_layout(checkpoint: Checkpoint, *, default: str) -> EmbeddingLayout:
    """Read modules.json and its neighbours; without them `default` pooling, and length 1.

    InvalidArgumentError for files that are broken, UnsupportedError for modules that are not known here.
    """
    described = checkpoint.entries("config_sentence_transformers.json")
    given, name = described.get("prompts"), described.get("default_prompt_name")
    layout = EmbeddingLayout(
        pooling=(default,),
        is_lowercase=any(
            checkpoint.entries(name).get("do_lower_case") is True for name in checkpoint.find("sentence_*_config.json")
        ),
        prompts={key: text for key, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {},
        default_prompt_name=name if isinstance(name, str) else None,
    )
    if checkpoint.find(MODULES_JSON):
        return _with_modules(layout, checkpoint)
    if checkpoint.find("1_Pooling/config.json"):
        return _with_pooling(layout, checkpoint.nested("1_Pooling"))
    return layout


def _with_modules(layout: EmbeddingLayout, checkpoint: Checkpoint) -> EmbeddingLayout:
    """As modules.json says: the network, pooling, then dense layers, and normalisation last."""
    path = checkpoint.place / MODULES_JSON
    has_pooling, is_normalised = False, False
    for position, (kind, place) in enumerate(_modules(checkpoint, path)):
        if kind in _WITHOUT_EFFECT:
            continue
        if kind == "Transformer" and position == 0:
            if place not in ("", "."):
                raise UnsupportedError(f"{path}: the network lies in {place}; name that directory as the model")
        elif kind == "Pooling" and not has_pooling:
            layout, has_pooling = _with_pooling(layout, checkpoint.nested(place)), True
        elif kind == "Dense" and has_pooling and not is_normalised:
            layout = replace(layout, dense=(*layout.dense, place))
        elif kind == "Normalize" and has_pooling:
            is_normalised = True
        else:
            raise UnsupportedError(
                f"{path}: module {position} is {quote(kind)}; supported are Transformer, Pooling, Dense and Normalize, "
                "in this order"
            )
    if not has_pooling:
        raise UnsupportedError(f"{path} has no Pooling: there is a vector for each token, and none for a text")
    return replace(layout, is_normalised=is_normalised)


def _with_pooling(layout: EmbeddingLayout, module: Checkpoint) -> EmbeddingLayout:
    path, entries = module.place / "config.json", module.entries("config.json")
    names: Any = [
        key.removeprefix("pooling_mode_")
        for key, value in entries.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if not names:
        named = entries.get("pooling_mode", "mean")
        names = named if isinstance(named, list) else [named]
    found = [pooling_of(name) if isinstance(name, str) else None for name in names]
    if None in found:
        raise UnsupportedError(
            f"{path}: pooling {quote(names[found.index(None)])} is not supported; there are {', '.join(POOLINGS)}"
        )
    return replace(
        layout,
        pooling=tuple(way for way in POOLINGS if way in found),
        is_prompt_pooled=entries.get("include_prompt") is not False,
    )


def _modules(checkpoint: Checkpoint, path: Path) -> list[tuple[str, str]]:
    """The class of each module, without its package, and its directory."""
    listed = checkpoint.document(MODULES_JSON)
    if not isinstance(listed, list):
        raise InvalidArgumentError(f"{path} must hold a JSON array, got {quote(listed)}")
    modules = []
    for one in listed:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise InvalidArgumentError(f"{path}: each module must have a type and a path, got {quote(one)}")
        modules.append((kind.rpartition(".")[2], place))
    return modules
