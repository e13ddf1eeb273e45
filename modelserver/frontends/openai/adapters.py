"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go while their model serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.models import LanguageModel, adapters_of, find_model, known_models
from modelserver.frontends.llm.requests import only_responses

if TYPE_CHECKING:
    from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane


class AdapterRoutes:
    """Serves the calls of the routes. `model`, or vLLM's `base_model_name`, says which model where several take
    adapters."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane

    async def load(self, call: Call) -> None:
        """Answer when the adapter has been read and fits the model. Raises ServerError."""
        fields = call.fields
        name, place = fields.text("lora_name"), fields.text("lora_path")
        if not name or not place:
            raise ParameterError("Both 'lora_name' and 'lora_path' must be provided.", "lora_name", Fault.MISSING)
        model = await self._model(call)
        loads = self._controlplane.adapters_for("load", model.name)
        replaces = fields.flag("load_inplace")
        if name in model.listed_adapters or any(name == each.name for each in await known_models(self._dataplane)):
            raise ParameterError(f"'{name:.200}' is a model, or an adapter of a model's files", "lora_name")
        adapter = loads.make(model.name, name, place, replaces=replaces)
        request = model.request({"operation": "load_adapter"}, {})
        request.parameters = {"lora_name": name}
        request.adapters = (adapter,)
        await only_responses(self._dataplane, [call.adopt(request)])
        loads.add(model.name, adapter)
        call.answer_plain(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, call: Call) -> None:
        """Requests that run end with the adapter. Raises ServerError."""
        name = call.fields.text("lora_name")
        if not name:
            raise ParameterError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name", Fault.MISSING
            )
        model = await self._model(call)
        loads = self._controlplane.adapters_for("unload", model.name)
        if name in model.listed_adapters:
            raise ParameterError(
                f"the adapter '{name:.200}' is one of the files of the model '{model.name}': remove it there",
                "lora_name",
            )
        loads.remove(model.name, name)
        call.answer_plain(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _model(self, call: Call) -> LanguageModel:
        name = call.fields.text("model") or call.fields.text("base_model_name")
        return await find_model(self._dataplane, name, "adapts")


def describe_adapters(dataplane: AnyDataPlane, model: LanguageModel, described: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of /v1/models for a model's adapters, beside its own."""
    return [
        {**described, "id": name, "root": place, "parent": described["id"]}
        for name, place in adapters_of(dataplane, model).items()
    ]
