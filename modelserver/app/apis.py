"""APIs that installed packages bring, and the operator's choice of APIs and ports."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable, Mapping

from modelserver.api import Api, ApiContext, ApiFactory
from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import FLAG, ApiChoice, nearest_hint

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "modelserver.apis"
# The form that a name also has in scopes of keys.
_OWN_NAMES = frozenset(
    {"kserve", "openai", "anthropic", "ollama", "tgi", "llamacpp", "console", "sagemaker", "metrics", "docs", "predict"}
)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)


def installed_apis(make_context: Callable[[str], ApiContext], choices: Mapping[str, ApiChoice]) -> list[Api]:
    """The APIs of installed packages, in the order of their names; those that are switched off are not imported.

    Raises InvalidArgumentError, naming the package, for one that cannot be made.
    """
    found = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)
    names = [entry_point.name for entry_point in found]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        packages = " and ".join(_package(each) for each in found if each.name == repeated)
        raise InvalidArgumentError(f"the API '{repeated}' is there twice, of {packages}: uninstall one of them")
    apis = []
    for entry_point in found:
        choice = choices.get(entry_point.name)
        if choice is None or choice.is_served:
            apis.append(_make(entry_point, make_context))
    return apis


def chosen_apis(apis: Iterable[Api], choices: Mapping[str, ApiChoice]) -> list[Api]:
    """The APIs as `--api` wants them: without those that are off, and with the ports that it names.

    Raises InvalidArgumentError for an unknown name.
    """
    apis = list(apis)
    known = [api.name.lower() for api in apis]
    for name, choice in choices.items():
        if name not in known and (choice.is_served or name not in _installed_names()):
            raise InvalidArgumentError(
                f"{FLAG}: there is no API '{name:.60}', expected one of {', '.join(known)}{nearest_hint(name, known)}"
            )
    chosen = []
    for api in apis:
        choice = choices.get(api.name.lower(), ApiChoice())
        if choice.is_served:
            chosen.append(api if choice.port is None else api.on_port(choice.port))
    return chosen


def program_apis(make_context: Callable[[str], ApiContext], factories: Mapping[str, ApiFactory]) -> list[Api]:
    """The APIs of the program that the server is part of. Raises InvalidArgumentError for a name that is taken."""
    taken = _OWN_NAMES | _installed_names()
    if name := next((name for name in factories if name in taken or not _NAME.fullmatch(name)), None):
        raise InvalidArgumentError(f"the program's API '{name}': the name is taken, or not of a-z, 0-9 and -")
    return [factory(make_context(name)) for name, factory in factories.items()]


def _installed_names() -> set[str]:
    return {entry_point.name for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _make(entry_point: importlib.metadata.EntryPoint, make_context: Callable[[str], ApiContext]) -> Api:
    name = entry_point.name
    where = f"the API '{name}' of {_package(entry_point)} ({entry_point.value})"
    advice = f"fix or uninstall the package, or start with {FLAG}={name}=off"
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(f"{where}: its name must be of a-z, 0-9 and -, and begin with a letter; {advice}")
    if name in _OWN_NAMES:
        raise InvalidArgumentError(f"{where}: the server itself has an API of that name; {advice}")
    try:
        api = entry_point.load()(make_context(name))
    except Exception as error:
        logger.debug("%s", where, exc_info=True)
        raise InvalidArgumentError(f"{where} cannot be made: {type(error).__name__}: {error}; {advice}") from error
    if not isinstance(api, Api):
        raise InvalidArgumentError(f"{where}: expected an Api, got {type(api).__name__}; {advice}")
    if api.name != name:
        raise InvalidArgumentError(f"{where} is called '{api.name}': expected the name of its entry point; {advice}")
    if not api.routes:
        raise InvalidArgumentError(f"{where} has no routes; {advice}")
    logger.info("%s has %d routes", where, len(api.routes))
    return api


def _package(entry_point: importlib.metadata.EntryPoint) -> str:
    """The distribution, as `pip` names it."""
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist is not None else "a package"
