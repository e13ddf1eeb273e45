"""Carries packages to a machine with a GPU and without a network, in parts that are small enough to be copied:

    python tests/gpu/wheelhouse.py make PARTS REQUIREMENT ...   # here: download, and write PARTS/part.000, ...
    python tests/gpu/wheelhouse.py join PARTS WHEELS            # there: put the wheels together again
    pip install --no-index --find-links WHEELS REQUIREMENT ...

`make` downloads for Linux on x86-64 and the Python that runs it, unless `--python` or `--platform` say another.
It needs nothing but pip, `join` nothing but Python. Parts whose bytes are not those that were written are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

PART_BYTES = 60 << 20
_CHUNK_BYTES = 1 << 20
_MANIFEST = "parts.json"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def make(parts: Path, requirements: Sequence[str], *, python: str, platforms: Sequence[str], index: str | None) -> None:
    """Download the wheels of requirements and all that they need, and split them."""
    with TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:", "--dest", wheels]
        command += ["--python-version", python, *(f"--platform={tag}" for tag in platforms)]
        command += [] if index is None else ["--extra-index-url", index]
        subprocess.run([*command, *requirements], check=True)
        split(Path(wheels), parts)


def split(directory: Path, parts: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the files of a directory into parts of at most `part_bytes`, and a list of the parts."""
    parts.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with TemporaryDirectory(dir=parts) as scratch:
        whole = Path(scratch) / "whole.tar"
        with tarfile.open(whole, "w") as archive:  # wheels are compressed already
            for path in sorted(directory.iterdir()):
                archive.add(path, arcname=path.name)
        with whole.open("rb") as file:
            while first := file.read(min(_CHUNK_BYTES, part_bytes)):
                path = parts / f"part.{len(written):03}"
                with path.open("wb") as part:
                    part.write(first)
                    _copy(file, part, part_bytes - len(first))
                written.append(path)
    digests = {path.name: _digest(path) for path in written}
    (parts / _MANIFEST).write_text(json.dumps(digests, indent=1) + "\n")
    return written


def join(parts: Path, directory: Path) -> list[Path]:
    """Put the files back into a directory. ValueError names a part that is missing or broken."""
    digests: dict[str, str] = json.loads((parts / _MANIFEST).read_text())
    for name, digest in digests.items():
        if not (parts / name).is_file():
            raise ValueError(f"{parts / name} is missing: {len(digests)} parts belong together")
        if _digest(parts / name) != digest:
            raise ValueError(f"{parts / name} is not as it was written: copy it again")
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory) as scratch:
        whole = Path(scratch) / "whole.tar"
        with whole.open("wb") as target:
            for name in digests:
                with (parts / name).open("rb") as part:
                    _copy(part, target, (parts / name).stat().st_size)
        with tarfile.open(whole) as archive:
            archive.extractall(directory, filter="data")
            return [directory / name for name in archive.getnames()]


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    """Up to `size` bytes."""
    target.writelines(_chunks(source, count))


def _chunks(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (chunk := file.read(min(_CHUNK_BYTES, count))):
        count -= len(chunk)
        yield chunk


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("parts", type=Path)
    making.add_argument("requirements", nargs="+")
    making.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    making.add_argument("--platform", action="append", help="a wheel's tag; may be given more than once")
    making.add_argument("--extra-index-url", help="an index besides PyPI, such as that of torch's builds for CUDA")
    joining = commands.add_parser("join")
    joining.add_argument("parts", type=Path)
    joining.add_argument("wheels", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(
            arguments.parts,
            arguments.requirements,
            python=arguments.python,
            platforms=arguments.platform or _PLATFORMS,
            index=arguments.extra_index_url,
        )
        print(f"{len(list(arguments.parts.glob('part.*')))} parts of at most {PART_BYTES >> 20} MiB")
    else:
        print(f"{len(join(arguments.parts, arguments.wheels))} files")


if __name__ == "__main__":
    main()
