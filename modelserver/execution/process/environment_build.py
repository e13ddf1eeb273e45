"""Making environments on disk: unpacking archives, installing requirements; once, however many ask for it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelserver.backend import InternalError, InvalidArgumentError

logger = logging.getLogger(__name__)

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
