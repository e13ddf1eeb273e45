"""Warnings about unused `--backend-config` settings, so that typing errors are noticed."""

from __future__ import annotations

from modelserver.backend import Backend
from modelserver.backend.discovery import list_backends
from modelserver.config.problem import Problem
from modelserver.config.suggestion import did_you_mean, suggest
from modelserver.repository.options import DefinitionOptions

# Settings that any backend accepts: ours, and the settings that Triton's server passes to all of its backends.
FOR_ALL = frozenset(
    {
        "allow-pickle",
        "auto-complete-config",
        "backend-directory",
        "default-max-batch-size",
        "execute-timeout-seconds",
        "min-compute-capability",
        "output-lines-per-second",
    }
)


def setting_warnings(options: DefinitionOptions, name: str, backend_class: type[Backend]) -> tuple[Problem, ...]:
    """One warning for each setting that is passed to backend `name` and that the backend does not know.

    Backends that do not declare their settings are not checked.
    """
    if backend_class.option_names is None:
        return ()
    known = backend_class.option_names | FOR_ALL
    given = [(f"{name},{key}", key) for key in options.backend_config.get(name, {})]
    given += [(key, key) for key in options.backend_config.get("", {})]
    return tuple(
        Problem(
            source=f"--backend-config={written}",
            line=None,
            column=None,
            field="",
            message=f"has no effect: backend '{name}' knows no setting '{key}'",
            hint=did_you_mean(suggest(key, known)),
        )
        for written, key in given
        if key not in known
    )


def unknown_backends(options: DefinitionOptions) -> tuple[str, ...]:
    """A sentence for each backend that `--backend-config` names but that is not installed.

    Empty if models may bring their own backends.
    """
    named = [name for name in options.backend_config if name]
    if options.allow_model_backends or not named:
        return ()
    known = [listing.name for listing in list_backends(options.backend_directories)]
    return tuple(
        f"--backend-config={name},...: there is no backend '{name}'" + _hint(suggest(name, known))
        for name in named
        if name not in known
    )


def _hint(nearest: str | None) -> str:
    return f"; {did_you_mean(nearest)}" if nearest else ""
