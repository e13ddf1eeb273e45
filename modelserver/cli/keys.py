"""`modelserver keys create | list`: API keys, and the file of their hashes that `--api-keys-file` names."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from modelserver.auth.api_keys import SCOPES, create_key, date_text, parse_date, parse_scopes, read_keys
from modelserver.auth.caller_limits import parse_limits_flag
from modelserver.cli.output import print_json, print_line, print_table
from modelserver.core.numerals import is_digits
from modelserver.errors import AlreadyExistsError, InvalidArgumentError

_COLUMNS = ("name", "id", "scopes", "models", "expires")
_LAST_S = 253_402_300_800.0  # the end of the year 9999, the last that a date can have
_SCOPES = ", ".join(scope.value for scope in SCOPES)


def create(
    name: Annotated[str, typer.Argument(help="Name of the key's owner, also in the audit log.")],
    scope: Annotated[
        list[str],
        typer.Option("--scope", help=f"What the key may do: {_SCOPES}, API:WORD. Repeat for several."),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Models that the key may use, with * and ?; default: all. Repeat for several."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            help="When the key expires: in days (90d), on a day (2026-12-31), or at a time with a time zone.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", help="NAME=NUMBER: requests_per_second, tokens_per_second, concurrent, weight."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Append the entry to this file; create it if needed.")
    ] = None,
) -> None:
    """Make a key and print it with the file's entry. The key cannot be recovered from the entry."""
    expires_s = _expiry(expires) if expires is not None else None
    limits = parse_limits_flag("--limit", ",".join(limit or ()))
    text, key = create_key(name, parse_scopes(scope), tuple(model or ()), limits, expires_s=expires_s)
    if file is not None:
        _append(file, name, key.line)
    print_line(f"key: {text}")
    print_line(f"{f'in {file}' if file is not None else 'line for the file'}: {key.line.strip()}")


def list_keys(
    file: Annotated[Path, typer.Argument(help="File of keys.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the entries of a key file, and check the file."""
    rows = [
        (
            key.name,
            key.id,
            sorted(scope.value for scope in key.scopes),
            list(key.models),
            None if key.expires_s is None else date_text(key.expires_s),
        )
        for key in read_keys(file).values()
    ]
    if as_json:
        print_json([dict(zip(_COLUMNS, row, strict=True)) for row in rows])
        return
    cells = [
        (name, key_id, ", ".join(scopes), ", ".join(models) or "*", expires or "never")
        for name, key_id, scopes, models, expires in rows
    ]
    print_table(_COLUMNS, cells)


def _expiry(text: str) -> float:
    """Days from now, or a date, in seconds since 1970. Raises InvalidArgumentError, also for a time in the past."""
    days, now_s = text.removesuffix("d"), time.time()
    if text.endswith("d") and is_digits(days, 12):
        expires_s = now_s + int(days) * 86_400
    else:
        try:
            expires_s = parse_date(text)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"--expires: got '{text}'; {error}, or in days such as 90d") from None
    if not now_s < expires_s < _LAST_S:
        raise InvalidArgumentError(f"--expires: '{text}' must be in the future, and before the year 10000")
    return expires_s


def _append(file: Path, name: str, line: str) -> None:
    """Replace the file atomically by one with an added entry, so that a server never reads half a file."""
    kept, mode = b"", 0o600
    if file.exists():
        if any(key.name == name for key in read_keys(file).values()):
            raise AlreadyExistsError(
                f"'{file}' already has a key named '{name}'; choose another name, or remove its line"
            )
        kept, mode = file.read_bytes(), file.stat().st_mode & 0o777
    if kept and not kept.endswith(b"\n"):
        kept += b"\n"
    new = file.with_name(f".{file.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise InvalidArgumentError(f"--file: cannot write '{new}': {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(kept + line.encode())
        stream.flush()
        os.fsync(descriptor)
    new.replace(file)


keys = typer.Typer(no_args_is_help=True, help="Create and list API keys (--api-keys-file).")
keys.command()(create)
keys.command("list")(list_keys)
