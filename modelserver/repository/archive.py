"""A directory that holds one model, or one ensemble with its models, whose name is given by whoever brings it.

<directory>/config.pbtxt, <directory>/<version>/...      the model itself
<directory>/<any name>/config.pbtxt, ...                 one model, or several, of which one is the ensemble
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.schema import EnsembleStep, ModelConfig
from modelserver.errors import ConfigError, InvalidArgumentError
from modelserver.repository.layout import CONFIG_FILENAME, looks_like_model, subdirectories
from modelserver.repository.roots import BackendFinder, RepositoryRoot, resolve_root


def archive_root(directory: Path, name: str, *, find_backend: BackendFinder) -> RepositoryRoot:
    """The root that `directory` is as a repository of its own, in which the model, or the ensemble, is called `name`.

    Blocking. Raises NotFoundError for a path that is no directory, InvalidArgumentError for one that holds no model,
    or several without one ensemble that needs them.
    """
    root = resolve_root(directory, name, find_backend)
    if root.model_name is not None:
        return replace(root, name=name)
    found = [entry for entry in subdirectories(directory) if looks_like_model(directory / entry)]
    if not found:
        raise InvalidArgumentError(
            f"there is no model in '{directory}': expected a {CONFIG_FILENAME}, or a directory with one"
        )
    if len(found) == 1:
        return RepositoryRoot(directory / found[0], name, name=name)
    return RepositoryRoot(directory, name=name, alias=(_ensemble(directory, found), name))


def _ensemble(directory: Path, models: list[str]) -> str:
    """The directory of the one ensemble that is not a step of another."""
    configs = {model: _config(directory / model / CONFIG_FILENAME) for model in models}
    ensembles = [model for model, config in configs.items() if config.is_ensemble]
    steps = {step.model_name for model in ensembles for step in _steps(configs[model])}
    top = [model for model in ensembles if model not in steps]
    if len(top) != 1:
        raise InvalidArgumentError(
            f"'{directory}' holds several models ({', '.join(models)}): expected one ensemble to be asked for them, "
            f"found {len(top)}"
        )
    return top[0]


def _config(path: Path) -> ModelConfig:
    """What can be read of a config; nothing of one that cannot: its load says why."""
    try:
        return read_pbtxt(path.read_text(encoding="utf-8"), str(path)).config
    except (OSError, UnicodeDecodeError, ConfigError):
        return ModelConfig()


def _steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    return config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
