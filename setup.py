"""What pyproject.toml has no words for: the parts in C, which an installation without a compiler goes without."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "modelserver.core._accelerator",
            ["modelserver/core/_accelerator.c"],
            depends=["modelserver/core/_decimal.h"],
            extra_compile_args=["-O2"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "modelserver_backends.llm._kernels",
            ["backends/llm/_kernels.c"],
            depends=["backends/llm/_kernels_vector.h"],
            extra_compile_args=["-O3"],
            py_limited_api=True,
            optional=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
