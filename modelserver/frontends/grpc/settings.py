"""The methods that read and change settings: those of the log, and those of request tracing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from modelserver.frontends.grpc.edge import answered
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import Method

if TYPE_CHECKING:
    from modelserver.planes.control import AnyControlPlane
    from modelserver.planes.data import AnyDataPlane


class Settings:
    """Answers LogSettings and TraceSetting. Called from the event loop thread."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self.log: Method = answered(pb.LogSettingsRequest, self._log)
        self.trace: Method = answered(pb.TraceSettingRequest, self._trace)

    def _trace(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """A setting without values is unset."""
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        settings = self._dataplane.update_trace_settings(changes, request.model_name)
        return pb.TraceSettingResponse(
            settings={
                name: pb.TraceSettingResponse.SettingValue(value=[value] if isinstance(value, str) else value)
                for name, value in settings.items()
            }
        )

    def _log(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        changes = {
            name: None if (kind := value.WhichOneof("parameter_choice")) is None else getattr(value, kind)
            for name, value in request.settings.items()
        }
        settings = self._controlplane.logs.update(changes)
        return pb.LogSettingsResponse(settings={name: _value(value) for name, value in asdict(settings).items()})


def _value(value: Any) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)
