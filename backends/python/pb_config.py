"""`pb_utils.ModelConfig`: the fields that `auto_complete_config` may add to a config, and their contradictions."""

from __future__ import annotations

import json
from typing import Any

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
_WHERE = "in auto-complete-config function"  # with dashes, as Triton writes it


class ModelConfig:
    """The config as a dict of its JSON form. What config.pbtxt says stays; contradictions raise ValueError."""

    def __init__(self, model_config: str | dict[str, Any]) -> None:
        self._config: dict[str, Any] = json.loads(model_config) if isinstance(model_config, str) else dict(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """The largest batch that the model takes; config.pbtxt may ask for less, not for more."""
        configured = int(self._config.get("max_batch_size") or 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but {_WHERE} for model '{self._name}' "
                f"specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Switch the dynamic batcher on, with its defaults unless config.pbtxt has settings."""
        chosen = next((key for key in _SCHEDULERS if self._config.get(key) is not None), None)
        if chosen is None:
            self._config["dynamic_batching"] = {}
        elif chosen != "dynamic_batching":
            raise ValueError(
                f"Configuration specified scheduling_choice as '{chosen}', but {_WHERE[3:]} for model "
                f"'{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
            )

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set `{"decoupled": bool}`."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property {_WHERE} for model '{self._name}' contains property "
                    f"other than 'decoupled'. Got '{key}'."
                )
        if "decoupled" not in transaction_policy_dict:
            raise ValueError(
                f"model transaction property {_WHERE} for model '{self._name}' is missing 'decoupled' property."
            )
        decoupled = bool(transaction_policy_dict["decoupled"])
        configured = self._config.get("model_transaction_policy")
        if configured and bool(configured.get("decoupled")) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{bool(configured.get('decoupled'))}'."
            )
        self._config["model_transaction_policy"] = {"decoupled": decoupled}

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002
        """Add an input: `name`, `data_type`, `dims` and perhaps `optional`."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output: `name`, `data_type`, `dims`."""
        self._add("output", output, ("name", "data_type", "dims"))

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        name = tensor.get("name", "")
        for key in tensor:
            if key not in allowed:
                *names, last = map(repr, allowed)
                raise ValueError(
                    f"{kind} '{name}' {_WHERE} for model '{self._name}' contains property other than "
                    f"{', '.join(names)} and {last}. Got '{key}'."
                )
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                title = f"{kind} '{name}'" if name else kind
                raise ValueError(f"{title} {_WHERE} for model '{self._name}' is missing '{key}' property.")
        tensors = self._config.setdefault(kind, [])
        present = next((entry for entry in tensors if entry.get("name") == name), None)
        if present is None:
            tensors.append({**tensor, "dims": list(tensor["dims"])})
        else:
            self._merge(kind, present, tensor)

    def _merge(self, kind: str, present: dict[str, Any], tensor: dict[str, Any]) -> None:
        name = tensor["name"]
        configured = present.get("data_type", "TYPE_INVALID")
        if configured in ("TYPE_INVALID", 0, None):
            present["data_type"] = tensor["data_type"]
        elif configured != tensor["data_type"]:
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {configured} for {kind} "
                f"'{name}', model provides {tensor['data_type']}"
            )
        dims = [int(size) for size in present.get("dims") or ()]
        if not dims:
            present["dims"] = list(tensor["dims"])
        elif dims != [int(size) for size in tensor["dims"]]:
            raise ValueError(
                f"model '{self._name}', tensor '{name}': the model expects dims {list(tensor['dims'])} but the model "
                f"configuration specifies dims {dims}"
            )
        if "optional" in tensor and not present.get("optional"):
            present["optional"] = bool(tensor["optional"])
