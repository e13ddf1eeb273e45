"""The real tritonserver, as the nvidia-pytriton wheel carries it, in an environment under `.bench/`.

The wheel holds the server, its Python backend with a stub per Python version, and most libraries. What it
does not hold is libpython, which comes from the interpreter that builds the environment, and a C++ model: the
`mini` backend, an identity in C++, is built from `triton_identity.cc` by g++ where there is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.environment import Environment, environment
from benchmarks.servers.process import ServerProcess, http_ready, run_server


def triton(repository: Path) -> AbstractContextManager[ServerProcess]:
    """tritonserver over `repository`; installs it first if needed. Raises SystemExit where it cannot be had."""
    peer = environment("triton", "nvidia-pytriton==0.7.0", "numpy")
    site = _with_backends(peer)
    server = site / "pytriton" / "tritonserver"

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        addresses = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
        return [
            str(server / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={peer.home / 'backends'}",
            f"--cache-directory={server / 'caches'}",
            *addresses,
            *(f"--{kind}-port={port}" for kind, port in ports.items()),
        ]

    libraries = [str(site / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR") or "")]
    env = {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PYTHONPATH": str(site),
        "PYTHONHOME": sys.base_prefix,
        "PATH": f"{peer.programs}:{os.environ['PATH']}",
    }
    return run_server("triton", command, ports=("http", "grpc", "metrics"), ready=http_ready(), env=env)


def _with_backends(peer: Environment) -> Path:
    """The folder of its packages; puts the backends together first if needed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = peer.home / "venv" / "lib" / f"python{version}" / "site-packages"
    bundled = site / "pytriton" / "tritonserver"
    backend = peer.home / "backends" / "python"
    if not backend.exists():
        shutil.copytree(bundled / "backends" / "python", backend)
        stub = backend / "triton_python_backend_stub"
        shutil.copy(bundled / "python_backend_stubs" / version / stub.name, stub)
        stub.chmod(0o755)
    mini = peer.home / "backends" / "mini" / "libtriton_mini.so"
    if not mini.exists() and shutil.which("g++"):
        mini.parent.mkdir(parents=True)
        source = Path(__file__).parent / "triton_identity.cc"
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(source), "-o", str(mini)], check=True)
    return site
