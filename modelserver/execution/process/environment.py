"""The interpreter that a model's processes run: the server's, one that the model brings, or one built for it.

A requirements.txt runs code when it is installed. So it is taken from where the operator writes: beside a Python model
or the config.pbtxt of a model, and never from a request. One that a published model brings along is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelserver.backend import Backend, BackendContext, InternalError, InvalidArgumentError, NotFoundError

logger = logging.getLogger(__name__)

EXECUTION_ENV_PATH = "EXECUTION_ENV_PATH"
REQUIREMENTS = "REQUIREMENTS"
_REQUIREMENTS_FILE = "requirements.txt"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_IGNORE = "ignore"
# What a child in another environment imports from the server.
_OWN_PACKAGES = ("modelserver", "modelserver_backends")
# Describes the interpreter, which must be compatible with the server's packages.
_ASK = "import sys, json; print(json.dumps([sys.implementation.name, *sys.version_info[:2]]))"
_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """An interpreter, "" for the server's own, and the variables that its processes need."""

    interpreter: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def has_environment(backend_class: type[Backend], context: BackendContext) -> bool:
    """Whether the model asks for an interpreter of its own. Raises InvalidArgumentError if a client asks for one."""
    asked = bool(context.parameter(EXECUTION_ENV_PATH)) or _requirements(backend_class, context) is not None
    if asked and context.is_uploaded and not backend_class.runs_code_of(context):
        raise InvalidArgumentError(
            f"model '{context.model_name}': files that come with a request bring no environment: "
            f"leave out {_REQUIREMENTS_FILE} and {EXECUTION_ENV_PATH}"
        )
    return asked


def environment_of(backend_class: type[Backend], context: BackendContext) -> PythonEnvironment:
    """The environment of a model, built or unpacked if that has not been done before. Blocking.

    Raises ServerError for a bad path or archive, or with the last lines of the installer's output.
    """
    interpreter = _brought(context)
    requirements = _requirements(backend_class, context)
    if requirements is not None:
        interpreter = _built(context, requirements, interpreter)
    if not interpreter:
        return PythonEnvironment()
    _check_version(context, interpreter)
    return PythonEnvironment(interpreter, _variables(Path(interpreter)))


def cache_directory(context: BackendContext) -> Path:
    """Where environments are kept: `--backend-config environment-directory=...`."""
    chosen = context.options.get("environment-directory", "")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelserver" / "python"


def _brought(context: BackendContext) -> str:
    """The interpreter of EXECUTION_ENV_PATH; "" without it."""
    text = context.parameter(EXECUTION_ENV_PATH)
    if not text:
        return ""
    what = f"model '{context.model_name}': parameter {EXECUTION_ENV_PATH}"
    path = Path(text.replace(_MODEL_DIRECTORY, str(context.model_directory)))
    if not path.exists():
        raise NotFoundError(f"{what}: there is no {path}")
    if path.is_file():
        path = _unpacked(context, path, what)
    interpreter = path / "bin" / "python"
    if not interpreter.exists():
        raise InvalidArgumentError(
            f"{what}: expected a virtual environment or an archive of one (conda-pack), but there is no {interpreter}"
        )
    return str(interpreter)


def _unpacked(context: BackendContext, archive: Path, what: str) -> Path:
    """The directory that holds the content of `archive`: unpacked once for each state of the file."""
    status = archive.stat()
    state = f"{archive.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    target = cache_directory(context) / f"unpacked-{_digest(state)}"
    with locked(target) as is_complete:
        if not is_complete:
            unpack_archive(archive, target, what)
    return target


def _requirements(backend_class: type[Backend], context: BackendContext) -> Path | None:
    """The requirements.txt of the version, if its files are code of the model, or that of the whole model."""
    if context.parameter(REQUIREMENTS).strip().lower() == _IGNORE:
        return None
    version, model = context.version_directory, context.model_directory
    directories = [version] if backend_class.runs_code_of(context) else []
    if model != version:
        directories.append(model)
    paths = (directory / _REQUIREMENTS_FILE for directory in directories)
    return next((path for path in paths if path.is_file()), None)


def _built(context: BackendContext, requirements: Path, interpreter: str) -> str:
    """The interpreter of a virtual environment that holds `requirements`: built once for each content of the file."""
    arguments = context.options.get("pip-arguments", "")
    base = interpreter or sys.executable
    state = "\n".join([requirements.read_text(encoding="utf-8"), os.path.realpath(base), sys.version, arguments])
    target = cache_directory(context) / f"built-{_digest(state)}"
    what = f"model '{context.model_name}': {requirements}"
    with locked(target) as is_complete:
        if not is_complete:
            build_environment(
                target, base, requirements, arguments, what, inherits=bool(interpreter), keeps_output_lines=20
            )
    return str(target / "bin" / "python")


def _check_version(context: BackendContext, interpreter: str) -> None:
    """Raise InvalidArgumentError unless the server's own packages fit the interpreter."""
    output = run_program([interpreter, "-I", "-c", _ASK], timeout_s=_ASK_TIMEOUT_S, what=f"{interpreter} does not run")
    theirs = tuple(json.loads(output.splitlines()[-1]))
    ours = (sys.implementation.name, *sys.version_info[:2])
    if theirs != ours:
        raise InvalidArgumentError(
            f"model '{context.model_name}': its environment has {theirs[0]} {theirs[1]}.{theirs[2]} ({interpreter}), "
            f"the server runs {ours[0]} {ours[1]}.{ours[2]}: make the environment with that version"
        )


def _variables(interpreter: Path) -> dict[str, str]:
    """The variables that "activating" the environment sets, and the paths of the server's own packages."""
    prefix = interpreter.parent.parent
    # Wherever the server finds its own: its environment's, the user's, those that .pth files add.
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    libraries = [*installed, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    own = {name: str(Path(importlib.import_module(name).__file__ or "")) for name in _OWN_PACKAGES}
    return {
        "PATH": f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(prefix),
        "MODELSERVER_CHILD_PACKAGES": json.dumps({"packages": own, "libraries": list(dict.fromkeys(libraries))}),
    }


def _digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()[:24]


# Written last: an environment without this file is unfinished.
_COMPLETE = ".complete"
_BUILD_TIMEOUT_S = 1800.0


@contextlib.contextmanager
def locked(target: Path) -> Iterator[bool]:
    """While one of all processes makes `target`: whether it is complete. Left without an error, it is from then on.

    Raises InternalError when the cache's directory cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(target.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InternalError(f"environments of models cannot be kept in {target.parent}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_complete = (target / _COMPLETE).exists()
        if not is_complete:
            shutil.rmtree(target, ignore_errors=True)
        yield is_complete
        (target / _COMPLETE).touch()
    except BaseException:
        if not (target / _COMPLETE).exists():
            shutil.rmtree(target, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def unpack_archive(archive: Path, target: Path, what: str) -> None:
    """Unpack a tar file, compressed or not, as `conda-pack` makes them. Raises InvalidArgumentError."""
    started_s = time.monotonic()
    try:
        with tarfile.open(archive) as content:
            target.mkdir()
            if hasattr(tarfile, "tar_filter"):
                content.extractall(target, filter="tar")
            else:
                content.extractall(target)  # noqa: S202  the operator's own file, on a Python without filters
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InvalidArgumentError(f"{what}: {archive} cannot be unpacked: {error}") from error
    mend = target / "bin" / "conda-unpack"
    if mend.exists():
        command = [str(target / "bin" / "python"), str(mend)]
        run_program(command, timeout_s=_BUILD_TIMEOUT_S, what=f"{what}: conda-unpack failed")
    logger.info("%s is unpacked in %s, %.1f s", archive, target, time.monotonic() - started_s)


def build_environment(
    target: Path,
    base: str,
    requirements: Path,
    arguments: str,
    what: str,
    *,
    inherits: bool,
    keeps_output_lines: int,
) -> None:
    """A virtual environment at `target` on the interpreter `base`, with the requirements installed.

    By `uv` where it is installed, else by `pip`; `arguments` are for its `install`. With `inherits` the packages of
    `base` can be imported too. Raises InternalError with the last lines that the installer wrote.
    """
    started_s = time.monotonic()
    logger.info("%s: installing into %s", what, target)
    site = ["--system-site-packages"] if inherits else []
    python = str(target / "bin" / "python")
    extra = shlex.split(arguments)
    uv = shutil.which("uv")
    if uv is not None:
        commands = [
            [uv, "venv", "--quiet", "--python", base, *site, str(target)],
            [uv, "pip", "install", "--python", python, "-r", str(requirements), *extra],
        ]
    else:
        has_pip = importlib.util.find_spec("pip") is not None
        install = [*(_pip_for(python) if has_pip else [python, "-m", "pip"]), "install", "--disable-pip-version-check"]
        commands = [
            [base, "-m", "venv", *([] if not has_pip else ["--without-pip"]), *site, str(target)],
            [*install, "-r", str(requirements), *extra],
        ]
    for command in commands:
        run_program(
            command, timeout_s=_BUILD_TIMEOUT_S, what=f"{what} cannot be installed", num_lines=keeps_output_lines
        )
    logger.info("%s: installed, %.1f s", what, time.monotonic() - started_s)


def run_program(command: Sequence[str], *, timeout_s: float, what: str, num_lines: int = 20) -> str:
    """The output of a program. Raises InternalError that begins with `what` and ends with its last lines."""
    try:
        done = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InternalError(f"{what}: {shlex.join(command)} took more than {timeout_s:.0f} s") from None
    except OSError as error:
        raise InternalError(f"{what}: {shlex.join(command)}: {error}") from error
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-num_lines:])
        raise InternalError(f"{what}: {shlex.join(command)} exited with code {done.returncode}:\n{tail}")
    return done.stdout


def _pip_for(python: str) -> list[str]:
    """Our own pip, which installs into another environment: that one needs none."""
    return [sys.executable, "-m", "pip", "--python", python]
