"""The repository's part of the server's options."""

from __future__ import annotations

from math import inf
from pathlib import Path

from modelserver.config.config_limits import parse_config_limits
from modelserver.options.server_options import ServerOptions
from modelserver.repository.cloud_uri import is_cloud_uri, parse_cloud_uri
from modelserver.repository.devices import gpu_ids
from modelserver.repository.options import ControlMode, DefinitionOptions, DemandOptions, RepositoryOptions


def repository_options(options: ServerOptions) -> RepositoryOptions:
    """The repository's part of the options."""
    return RepositoryOptions(
        roots=tuple(parse_cloud_uri(path) if is_cloud_uri(path) else Path(path) for path in options.model_repository),
        control_mode=ControlMode(options.model_control_mode),
        load_models=options.load_model,
        model_name=options.model_name,
        is_exit_on_error=options.exit_on_error,
        poll_interval_s=float(options.repository_poll_secs),
        load_thread_count=options.model_load_thread_count,
        load_retry_count=options.model_load_retry_count,
        unload_grace_s=options.unload_grace_secs,
        default_max_queue_size=options.max_queue_size,
        cloud_cache_directory=Path(options.cloud_cache_directory) if options.cloud_cache_directory else None,
        cloud_cache_bytes=options.cloud_cache_byte_size,
        has_namespaces=options.model_namespacing,
        demand=DemandOptions(
            is_on=options.load_on_demand,
            keep_alive_s=inf if options.model_keep_alive_secs < 0 else float(options.model_keep_alive_secs),
            budget_bytes=options.on_demand_memory_budget,
        ),
        override_directory=Path(options.override_directory) if options.override_directory else None,
        definition=DefinitionOptions(
            config_name=options.model_config_name,
            backend_directories=tuple(Path(path) for path in options.backend_directory),
            backend_config=_backend_config(options),
            is_auto_complete_disabled=not options.auto_complete_config,
            allow_model_backends=options.allow_model_backends,
            agent_directory=Path(options.repoagent_directory) if options.repoagent_directory else None,
            limits=parse_config_limits(options.config_limits),
            gpu_ids=gpu_ids(options.min_supported_compute_capability),
        ),
    )


def _backend_config(options: ServerOptions) -> dict[str, dict[str, str]]:
    """The settings of backends, with the common ones that have flags of their own."""
    settings = options.backend_options
    common = {
        "execute-timeout-seconds": str(options.execute_timeout_secs),
        "output-lines-per-second": str(options.model_output_lines_per_sec),
        **settings.get("", {}),
    }
    return {**settings, "": common}
