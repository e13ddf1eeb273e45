"""What a request says of adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from modelserver.backend import InvalidArgumentError, LoadedAdapter, UnsupportedError

from ..json_fields import number, quote, string

# Parameters of requests: the name of an adapter, vLLM's object of one, and several with their scales.
_NAME, _REQUEST, _SEVERAL = "lora_name", "lora_request", "lora"
ADAPTER_PARAMETERS = (_NAME, _REQUEST, _SEVERAL)
_MOST = 16


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter that a request asks for, as much as `scale` says.

    `place` is where one lies that was loaded while the model serves, and `load` the number of that load; without it the
    model's options say where.
    """

    name: str
    scale: float = 1.0
    place: str = ""
    load: int = 0


def read_uses(values: dict[str, Any], loaded: Collection[LoadedAdapter]) -> tuple[AdapterUse, ...]:
    """Take what is said of adapters out of a request's parameters. `loaded` are those that the server has loaded.

    Raises InvalidArgumentError, which names the parameter.
    """
    name, asked, several = (values.pop(key, None) for key in ADAPTER_PARAMETERS)
    if isinstance(asked, dict):
        asked = asked.get("lora_name", asked.get("name"))
    chosen = [(string(key, each), 1.0) for key, each in ((_NAME, name), (_REQUEST, asked)) if each]
    if several is not None:
        if not isinstance(several, list) or len(several) > _MOST or not all(isinstance(each, dict) for each in several):
            raise InvalidArgumentError(
                f"parameter '{_SEVERAL}' must be a list of at most {_MOST} objects with name and scale, got "
                f"{quote(several)}"
            )
        chosen += [(string("name", each.get("name")), number("scale", each.get("scale", 1.0))) for each in several]
    places = {each.name: each for each in loaded}
    found = []
    for each, scale in dict(chosen).items():
        place = places.get(each)
        found.append(AdapterUse(each, scale) if place is None else AdapterUse(each, scale, place.place, place.load))
    return tuple(found)


def refuse_adapters(uses: Collection[AdapterUse]) -> None:
    """Raise UnsupportedError, of a model without adapters, if there are any."""
    if uses:
        raise UnsupportedError("LoRA feature is not enabled. Remove the parameter 'lora_name'.")
