"""Generate modelserver/pb/ from the .proto files beside this script.

    python protos/generate.py            write the modules and their type stubs
    python protos/generate.py --check    exit with 1 and name the files that are not current

Needs grpcio-tools of the version pinned in pyproject.toml. The modules register their messages in
`modelserver.pb.pool.POOL` instead of protobuf's default pool; that is why protoc's own are not used.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
TARGET = PROTOS.parent / "modelserver" / "pb"
BYTES_PER_LINE = 60

_HEADER = "# Generated from protos/{name}.proto by `python protos/generate.py`; do not edit.\n"
# The stubs of protoc leave some types out.
_STUB_HEADER = '# mypy: disable-error-code="no-untyped-def,type-arg"\n'
_MODULE = '''"""Messages of protos/{name}.proto."""

{imports}from modelserver.pb.pool import add_file

DESCRIPTOR = add_file(
{serialized},
    globals(),
)
'''


def generate() -> dict[str, str]:
    """File name in modelserver/pb/ -> content."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        sources = sorted(path.name for path in PROTOS.glob("*.proto"))
        arguments = ["protoc", f"-I{PROTOS}", f"--descriptor_set_out={out / 'set'}", f"--pyi_out={out}", *sources]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        files = descriptor_pb2.FileDescriptorSet.FromString((out / "set").read_bytes()).file
        contents: dict[str, str] = {}
        for file in files:
            name = file.name.removesuffix(".proto")
            contents[f"{name}_pb2.py"] = _HEADER.format(name=name) + _module(name, file)
            contents[f"{name}_pb2.pyi"] = _HEADER.format(name=name) + _stub(file, (out / f"{name}_pb2.pyi").read_text())
        return contents


def _module(name: str, file: descriptor_pb2.FileDescriptorProto) -> str:
    _clear_json_names(file.message_type)
    serialized = file.SerializeToString(deterministic=True)
    chunks = [serialized[i : i + BYTES_PER_LINE] for i in range(0, len(serialized), BYTES_PER_LINE)]
    imports = "".join(f"import modelserver.pb.{_pb2(dependency)}  # noqa: F401\n" for dependency in file.dependency)
    return _MODULE.format(name=name, imports=imports, serialized="\n".join(f"    {chunk!r}" for chunk in chunks))


def _clear_json_names(messages: list[descriptor_pb2.DescriptorProto]) -> None:
    """Drop what protoc adds to a descriptor set and every runtime derives again."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _clear_json_names(message.nested_type)


def _stub(file: descriptor_pb2.FileDescriptorProto, text: str) -> str:
    for dependency in file.dependency:
        module = _pb2(dependency)
        text = text.replace(f"import {module} as", f"from modelserver.pb import {module} as")
    return _STUB_HEADER + text


def _pb2(proto: str) -> str:
    return proto.removesuffix(".proto") + "_pb2"


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate modelserver/pb/ from protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    check = parser.parse_args().check
    stale = []
    for name, content in generate().items():
        path = TARGET / name
        if not path.exists() or path.read_text() != content:
            stale.append(name)
            if not check:
                path.write_text(content)
    for name in stale:
        sys.stdout.write(f"{'not current' if check else 'written'}: modelserver/pb/{name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
