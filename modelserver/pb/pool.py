"""The descriptor pool that holds our messages.

Protobuf's default pool refuses a second file of the same name or with the same message names. Clients
(tritonclient, KServe) register theirs there, so ours live in a pool of our own and both can be
imported in one process, in either order.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal import builder  # the way all generated code makes its classes

POOL = DescriptorPool()


def add_file(serialized: bytes, namespace: dict[str, Any]) -> FileDescriptor:
    """Add a serialized FileDescriptorProto; put its messages and enums into the `namespace` of a module.

    Files that it imports must have been added before. Called by the generated modules only.
    """
    file: FileDescriptor = POOL.AddSerializedFile(serialized)
    builder.BuildTopDescriptorsAndMessages(file, namespace["__name__"], namespace)
    return file
