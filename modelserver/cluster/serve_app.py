"""An application of Ray Serve that deploys pools and is healthy while they are: KubeRay's RayService knows no others.

`docker/ray/rayservice.yaml` has it. No request passes it, nor Serve's own proxies.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, Final

from modelserver.cluster.control import ControllerClient
from modelserver.cluster.deployment import parse_deployment
from modelserver.cluster.ray_cluster import import_ray
from modelserver.errors import UnavailableError

_POLL_S: Final = 1.0


class DeployedPools:
    """What Serve runs one of. Its start ends when all pools are as deployed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """`document` is that of a deployment file; paths in it are absolute, or addresses of object stores.

        Raises InvalidArgumentError for a wrong document, UnavailableError when a pool went back to earlier servers.
        """
        self._controller = ControllerClient(import_ray(), creates=True)
        self._controller.call("deploy", parse_deployment(document, "args"))
        while not all(pool["settled"] for pool in self._pools()):
            time.sleep(_POLL_S)

    def check_health(self) -> None:
        """Serve asks from time to time. Raises UnavailableError when a pool that should have servers has none."""
        for pool in self._pools():
            if pool["wanted"] and not pool["ready"]:
                raise UnavailableError(f"pool {pool['name']}: none of {pool['wanted']} replicas is ready")

    def _pools(self) -> list[dict[str, Any]]:
        pools: list[dict[str, Any]] = self._controller.call("status")["pools"]
        for pool in pools:
            if pool["rejected"]:
                raise UnavailableError(f"pool {pool['name']} runs its previous servers: {pool['rejected']}")
        return pools


def build(document: dict[str, Any]) -> Any:
    """The application, of the `args` of a Serve config. Needs the package `ray[serve]`."""
    serve = importlib.import_module("ray.serve")
    deployment = serve.deployment(DeployedPools)
    return deployment.options(name="pools", num_replicas=1, ray_actor_options={"num_cpus": 0}).bind(document)
