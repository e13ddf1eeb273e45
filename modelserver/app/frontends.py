"""The frontends of a server: one for each protocol, behind keys where there are any, HTTP's behind the access log."""

from __future__ import annotations

import os
from dataclasses import replace

from modelserver.app.ports import Frontends, grpc_limits, http_limits
from modelserver.auth.api_keys import KeyRing
from modelserver.auth.authorized_planes import keyed_planes
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.grpc.keyed import grpc_frontend
from modelserver.frontends.grpc.servicer import GrpcFrontend
from modelserver.frontends.http.access_log import with_access_log
from modelserver.frontends.http.clouds import sagemaker_frontend, vertex_ai_frontend
from modelserver.frontends.http.cors import with_cors
from modelserver.frontends.http.keyed import http_frontend, keyed_cloud, keyed_metrics
from modelserver.frontends.http.metrics import MetricsFrontend
from modelserver.frontends.http.routes import HttpFrontend as KServeFrontend
from modelserver.options.server_options import ServerOptions
from modelserver.planes.control import AnyControlPlane, ControlPlane
from modelserver.planes.data import AnyDataPlane, DataPlane
from modelserver.protocol.exchange import Frontend as HttpFrontend
from modelserver.telemetry.metrics import ServerMetrics


class ServerFrontends:
    """Makes them over the planes of one server."""

    def __init__(
        self, options: ServerOptions, dataplane: DataPlane, controlplane: ControlPlane, keys: KeyRing | None
    ) -> None:
        self._options = options
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._keys = keys

    def make(self, metrics: ServerMetrics) -> Frontends:
        """Those that the options ask for."""
        options = self._options
        page = MetricsFrontend(metrics.collect_slices) if options.allow_metrics else None
        return Frontends(
            dataplane=self._dataplane,
            http=self._whole_http(page) if options.allow_http else None,
            grpc=self._grpc() if options.allow_grpc else None,
            metrics=keyed_metrics(page, self._keys) if page is not None else None,
            sagemaker=with_access_log(self._sagemaker(), is_logged=options.access_log)
            if options.allow_sagemaker
            else None,
            vertex_ai=with_access_log(self._vertex_ai(), is_logged=options.access_log)
            if options.allow_vertex_ai
            else None,
            logs=self._controlplane.logs,
        )

    def _http(self, metrics: MetricsFrontend | None = None) -> KServeFrontend:
        return http_frontend(self._dataplane, self._controlplane, http_limits(self._options), self._keys, metrics)

    def _whole_http(self, metrics: MetricsFrontend | None) -> HttpFrontend:
        """What the HTTP port serves, of one process or of several: front processes see to CORS themselves."""
        frontend = with_access_log(self._http(metrics), is_logged=self._logs_access)
        return with_cors(frontend, self._options.http_cors) if self._options.wire_processes == 1 else frontend

    def _grpc(self) -> GrpcFrontend:
        limits = grpc_limits(self._options)
        limits = replace(limits, access=replace(limits.access, is_logged=self._logs_access))
        return grpc_frontend(self._dataplane, self._controlplane, limits, self._keys)

    @property
    def _logs_access(self) -> bool:
        """Whether this process writes the access log; where there are front processes, they do."""
        return self._options.access_log and self._options.wire_processes == 1

    def _cloud_planes(self) -> tuple[AnyDataPlane, AnyControlPlane]:
        """What the endpoints of clouds ask by themselves; the rest they leave to a frontend of KServe's routes."""
        if self._keys is None:
            return self._dataplane, self._controlplane
        return keyed_planes(self._dataplane, self._controlplane, self._keys)

    def _sagemaker(self) -> HttpFrontend:
        model = os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "")
        return keyed_cloud(sagemaker_frontend(self._http(), *self._cloud_planes(), model), self._keys)

    def _vertex_ai(self) -> HttpFrontend:
        paths = [os.environ.get(f"AIP_{name}_ROUTE", "").rstrip("/") for name in ("HEALTH", "PREDICT")]
        if not all(path.startswith("/") for path in paths):
            raise InvalidArgumentError(
                "--allow-vertex-ai needs the environment variables AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE: the paths "
                "that Vertex AI asks"
            )
        health_path, predict_path = paths
        frontend = vertex_ai_frontend(
            self._http(),
            self._cloud_planes()[0],
            health_path=health_path,
            predict_path=predict_path,
            model=self._options.vertex_ai_default_model,
        )
        return keyed_cloud(frontend, self._keys)
