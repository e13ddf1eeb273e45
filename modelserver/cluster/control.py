"""What commands do with a cluster: connect to it, and call its controller."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from modelserver.cluster.controller import Controller
from modelserver.cluster.ray_cluster import NAMESPACE, StateStore, import_ray
from modelserver.errors import NotFoundError, ServerError, UnavailableError

_CONTROLLER: Final = "controller"
# Every cluster has it on the node that it was started with: the controller's port is there, also after its restart.
_HEAD: Final = {"node:__internal_head__": 0.001}
_CALL_S: Final = 60.0


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The library, connected to the cluster at `address` ("auto": one that this machine is a node of) unless it is
    connected already. Raises UnavailableError when there is no cluster."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnavailableError(
            f"cannot reach a Ray cluster at '{address}': {first} (`ray start --head` makes this machine one)"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


class ControllerClient:
    """The calls of the controller, from a program that is connected. Raises ServerError as the controller does."""

    def __init__(self, ray: Any, *, creates: bool = False) -> None:
        """With `creates` the controller is started if there is none; else raises NotFoundError then."""
        self._ray = ray
        if creates:
            kind = ray.remote(Controller)
            self._actor = kind.options(
                name=_CONTROLLER,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources=_HEAD,
                max_restarts=-1,
                max_task_retries=3,
                max_concurrency=16,
            ).remote()
            return
        try:
            self._actor = ray.get_actor(_CONTROLLER, namespace=NAMESPACE)
        except ValueError:
            raise NotFoundError("nothing is deployed in this cluster: see modelserver deploy --help") from None

    def call(self, method: str, *arguments: object) -> Any:
        """The answer of a method. Raises UnavailableError when there is none."""
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=_CALL_S)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ServerError):
                raise error.cause from None
            raise
        except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
            raise UnavailableError(f"the controller of the cluster does not answer: {error}") from None

    def end(self) -> None:
        """Stop the controller for good, and forget what was deployed."""
        self._ray.kill(self._actor, no_restart=True)
        StateStore().write(b"")
