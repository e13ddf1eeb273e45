"""What pyproject.toml has no words for: the parts in C, which an installation without a compiler goes without."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup


def source_digest(directory: str) -> tuple[str, str]:
    """So that a build knows what it was made of: see modelserver/core/accelerator.py."""
    sources = sorted(Path(directory).glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return "SOURCE_DIGEST", f'"{digest}"'


setup(
    ext_modules=[
        Extension(
            "modelserver.core._accelerator",
            ["modelserver/core/_accelerator.c"],
            depends=["modelserver/core/_decimal.h"],
            define_macros=[source_digest("modelserver/core")],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modelserver.wire.sockets._calls",
            ["modelserver/wire/sockets/_calls.c"],
            define_macros=[source_digest("modelserver/wire/sockets")],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modelserver_backends.llm._kernels",
            ["backends/llm/_kernels.c"],
            depends=["backends/llm/_kernels_threads.h", "backends/llm/_kernels_vector.h"],
            define_macros=[source_digest("backends/llm")],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modelserver_backends.llm._packed_linear",
            ["backends/llm/_packed_linear.c"],
            depends=[
                "backends/llm/_kernels_threads.h",
                "backends/llm/_packed_blocks.h",
                "backends/llm/_packed_vector.h",
            ],
            define_macros=[source_digest("backends/llm")],
            # Every instruction set rounds alike: no products and sums become one operation but where the code says so.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
