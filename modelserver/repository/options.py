"""Options of the repository: where models are and how they are loaded."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelserver.config.config_limits import ConfigLimits
from modelserver.errors import UnavailableError
from modelserver.store.cloud_uri import CloudUri, is_cloud_uri, parse_cloud_uri
from modelserver.telemetry.gpu import usable_gpus


def gpu_ids(least_capability: float = 0.0) -> tuple[int, ...]:
    """CUDA's numbers of the NVIDIA GPUs that this process can use, without those of a lower compute capability."""
    return usable_gpus(least_capability)


class ControlMode(enum.Enum):
    """The model control mode; the values are those of `--model-control-mode`."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"

    def check_explicit(self, verb: str) -> None:
        """Raise UnavailableError unless models may be loaded and unloaded on request."""
        if self is ControlMode.EXPLICIT:
            return
        raise UnavailableError(  # Triton says this for both other modes, and its clients' tests match it
            f"explicit model load / unload is not allowed if polling is enabled: the model control mode is "
            f"'{self.value}'; to {verb} models on request start the server with --model-control-mode=explicit"
        )


@dataclass(frozen=True, slots=True)
class DefinitionOptions:
    """How a model's config is found, completed and checked.

    `backend_config` holds the `--backend-config <backend>,key=value` pairs by backend name; those given
    without a backend are under "". `config_name` is `--model-config-name`, `agent_directory` is
    `--repoagent-directory`. `gpu_ids` are CUDA's numbers of the GPUs that models may be placed on; this machine's.
    `limits` are `--config-limits`.
    """

    config_name: str = ""
    backend_directories: tuple[Path, ...] = ()
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    is_auto_complete_disabled: bool = False
    allow_model_backends: bool = False
    agent_directory: Path | None = None
    gpu_ids: tuple[int, ...] = field(default_factory=gpu_ids)
    limits: ConfigLimits = field(default_factory=ConfigLimits)

    def backend_options(self, backend_name: str) -> dict[str, str]:
        """The settings of one backend: the pairs for all backends, then its own."""
        return {**self.backend_config.get("", {}), **self.backend_config.get(backend_name, {})}


@dataclass(frozen=True, slots=True)
class DemandOptions:
    """Options of load on demand. `is_on` is the default for models whose config does not set it.

    `keep_alive_s` is how long they stay without requests, `budget_bytes` limits their total memory (0: no limit),
    `room_patience_s` how long one waits for others to become idle.
    """

    is_on: bool = False
    keep_alive_s: float = 300.0
    budget_bytes: int = 0
    room_patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """Options of `ModelRepository`, one per Triton flag of the same name.

    `model_name` names a root that is itself one model. `poll_interval_s` is `--repository-poll-secs`,
    `has_namespaces` is `--model-namespacing`, `default_max_queue_size` is `--max-queue-size` (0: no limit),
    `unload_grace_s` is `--unload-grace-secs` (0: no limit).
    Overrides are kept in `override_directory`, if any. Models of object stores are copied to `cloud_cache_directory`
    (None: the user's cache), which is held to about `cloud_cache_bytes` (0: no limit). `demand` are the options
    of load on demand. `store` is the directory of a model store, whose models are further ones, on demand.
    """

    roots: tuple[Path | CloudUri, ...]
    control_mode: ControlMode = ControlMode.NONE
    load_models: tuple[str, ...] = ()
    model_name: str = ""
    is_exit_on_error: bool = False
    poll_interval_s: float = 15.0
    load_thread_count: int = 4
    load_retry_count: int = 0
    unload_grace_s: float = 0.0
    default_max_queue_size: int = 0
    override_directory: Path | None = None
    has_namespaces: bool = False
    cloud_cache_directory: Path | None = None
    cloud_cache_bytes: int = 0
    store: Path | None = None
    definition: DefinitionOptions = field(default_factory=DefinitionOptions)
    demand: DemandOptions = field(default_factory=DemandOptions)


def place_of(repository: str) -> Path | CloudUri:
    """Where a `--model-repository` is. Raises InvalidArgumentError for an address of no known form."""
    return parse_cloud_uri(repository) if is_cloud_uri(repository) else Path(repository)
