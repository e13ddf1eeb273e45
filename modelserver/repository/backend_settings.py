"""`--backend-config` settings that nobody reads: a typing error there should not stay unnoticed."""

from __future__ import annotations

from modelserver.backend import Backend
from modelserver.backend.discovery import list_backends
from modelserver.config.problem import Problem
from modelserver.config.suggestion import did_you_mean, suggest
from modelserver.repository.options import DefinitionOptions

# Settings that may be given to any backend: ours, and those that Triton's server hands to all of its own.
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
    """One warning per setting that reaches backend `name` and that it does not know.

    A backend that does not declare its settings is not judged.
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
    """A sentence for each backend that `--backend-config` names and that is nowhere.

    Nothing is said where models may bring backends of their own.
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
