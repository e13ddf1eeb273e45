"""`modelserver doctor`: checks the machine for known problems, and says how to fix them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from modelserver.auth.api_keys import open_keys
from modelserver.backend.discovery import find_backend, list_backends
from modelserver.cli.completion import FlagCommand
from modelserver.cli.output import AsJson, print_json, print_line, print_table
from modelserver.cli.usage import bytes_text
from modelserver.client.server_client import ServerClient
from modelserver.errors import ServerError
from modelserver.options.server_options import ServerOptions
from modelserver.options.sources import resolve_options
from modelserver.platform.diagnosis import Finding, FindingLevel
from modelserver.repository.options import gpu_ids
from modelserver.store.cloud_uri import is_cloud_uri
from modelserver.telemetry.host import HostGauges

OK, WARNING, PROBLEM = FindingLevel.OK, FindingLevel.WARNING, FindingLevel.PROBLEM

# A connection takes a descriptor, and so does each shared-memory buffer of a child process.
_ENOUGH_FILES = 4096
_ENOUGH_SHM_BYTES = 256 << 20
_ENOUGH_DISK_BYTES = 1 << 30
_ENOUGH_BACKLOG = 1024
# Certificates are checked against the clock. A time before this server was written is wrong.
_EARLIEST_S = 1_767_225_600  # 2026-01-01
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_PROBE_TIMEOUT_S = 1.0
_SHM = "/dev/shm"  # noqa: S108 - the system's place of shared memory


def machine_findings(options: ServerOptions) -> list[Finding]:
    """The findings, in the order of the checks; `options` name the ports and directories to check."""
    return [finding for check in _CHECKS for finding in check(options)]


def _versions(_: ServerOptions) -> Iterator[Finding]:
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "protobuf", "grpcio"))
    yield Finding(
        OK,
        "versions",
        f"modelserver {importlib.metadata.version('modelserver-py')}, Python {platform.python_version()}, {packages}, "
        f"{platform.system()} {platform.release()}",
    )
    try:
        yield Finding(OK, "event loop", f"uvloop {importlib.metadata.version('uvloop')}")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            WARNING, "event loop", "asyncio's own", "pip install uvloop: up to a tenth more requests per second"
        )


def _ports(options: ServerOptions) -> Iterator[Finding]:
    metrics_address = options.metrics_host
    for name, is_on, address, port in (
        ("http", options.allow_http, options.http_host, options.http_port),
        ("grpc", options.allow_grpc, options.grpc_host, options.grpc_port),
        ("metrics", options.allow_metrics, metrics_address, options.metrics_port),
    ):
        if is_on and port:
            yield _port(name, address, port)


def _port(name: str, address: str, port: int) -> Finding:
    subject = f"{name} port {port}"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            return Finding(PROBLEM, subject, "needs rights that you do not have", f"name another with --{name}-port")
        except OSError as error:
            if name == "http" and (server := _server_at(address, port)):
                return Finding(OK, subject, f"in use by {server}")
            return Finding(
                WARNING, subject, f"{address}: {error.strerror}", f"a second server needs another: --{name}-port"
            )
    return Finding(OK, subject, f"free on {address}")


def _server_at(address: str, port: int) -> str:
    """The name and version of the server that already runs there, or empty."""
    host = "localhost" if address in ("0.0.0.0", "::") else address  # noqa: S104 - compared, not bound
    try:
        metadata = ServerClient(f"http://{host}:{port}", timeout_s=_PROBE_TIMEOUT_S).server_metadata()
        return f"{metadata['name']} {metadata['version']}"
    except (ServerError, KeyError, TypeError):
        return ""


def _limits(_: ServerOptions) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"raise it: ulimit -n {_ENOUGH_FILES * 16} (compose: ulimits.nofile; systemd: LimitNOFILE)"
    is_enough = soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES
    yield Finding(
        OK if is_enough else WARNING, "open files", f"limit {soft} (hard {hard})", "" if is_enough else advice
    )
    try:
        backlog = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return
    if backlog < _ENOUGH_BACKLOG:
        advice = f"bursts of clients are turned away: sysctl -w net.core.somaxconn={_ENOUGH_BACKLOG * 4}"
        yield Finding(WARNING, "connection backlog", str(backlog), advice)


def _memory(_: ServerOptions) -> Iterator[Finding]:
    reading = HostGauges(0.0).read()
    yield Finding(
        OK,
        "memory",
        f"{bytes_text(reading.memory_used_bytes)} of {bytes_text(reading.memory_total_bytes)} in use",
    )
    yield Finding(OK, "CPUs", f"{len(os.sched_getaffinity(0))} may be used of {os.cpu_count()}")


def _shared_memory(options: ServerOptions) -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("modelserver-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        advice = "Python models pass tensors through it: allow memfd_create in the seccomp profile"
        yield Finding(PROBLEM, "shared memory", f"memfd_create is refused: {error.strerror}", advice)
    else:
        yield Finding(OK, "shared memory", "memfd, for models in processes of their own")
    if not options.allow_client_shm:
        return
    size = shutil.disk_usage(_SHM).total
    advice = "clients' regions lie there: --shm-size=1g (docker), an emptyDir of medium Memory (Kubernetes)"
    is_enough = size >= _ENOUGH_SHM_BYTES
    yield Finding(OK if is_enough else WARNING, _SHM, bytes_text(size), "" if is_enough else advice)


def _disk(_: ServerOptions) -> Iterator[Finding]:
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    advice = "" if free >= _ENOUGH_DISK_BYTES else "models from object stores and engines are built there: free some"
    yield Finding(OK if not advice else WARNING, f"disk of {directory}", f"{bytes_text(free)} free", advice)


def _repositories(options: ServerOptions) -> Iterator[Finding]:
    for path in options.model_repository:
        if is_cloud_uri(path):
            continue
        if not Path(path).is_dir():
            yield Finding(PROBLEM, f"repository {path}", "is not a directory", "see --model-repository")
        elif not os.access(path, os.R_OK | os.X_OK):
            yield Finding(PROBLEM, f"repository {path}", "cannot be read by this user", "see its owner and mode")
        else:
            yield Finding(OK, f"repository {path}", "can be read; 'modelserver check' looks into it")


def _keys(options: ServerOptions) -> Iterator[Finding]:
    if not options.api_keys_file:
        return
    try:
        open_keys(options.api_keys_file)
    except ServerError as error:
        yield Finding(PROBLEM, "API keys", error.message, "see 'modelserver keys'")
        return
    mode = Path(options.api_keys_file).stat().st_mode
    advice = "" if not mode & 0o077 else f"others may read or change it: chmod 600 {options.api_keys_file}"
    yield Finding(OK if not advice else WARNING, "API keys", options.api_keys_file, advice)


def _gpus(_: ServerOptions) -> Iterator[Finding]:
    gpus = gpu_ids()
    try:
        driver = _DRIVER_VERSION.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    if gpus:
        found = f"{len(gpus)}, {driver}" if driver else f"{len(gpus)}, but the driver does not report its version"
        yield Finding(OK if driver else WARNING, "NVIDIA GPUs", found)
    elif driver:
        advice = "the driver has no visible device: docker run --gpus all, or nvidia.com/gpu in the pod's limits"
        yield Finding(WARNING, "NVIDIA GPUs", "none that this process may open", advice)
    else:
        yield Finding(OK, "NVIDIA GPUs", "none")


def _clock(_: ServerOptions) -> Iterator[Finding]:
    if time.time() < _EARLIEST_S:
        found = time.strftime("%Y-%m-%d", time.gmtime())
        yield Finding(WARNING, "clock", f"says {found}", "certificates will look invalid: set it")


_CHECKS: tuple[Callable[[ServerOptions], Iterator[Finding]], ...] = (
    _versions,
    _ports,
    _limits,
    _memory,
    _shared_memory,
    _disk,
    _repositories,
    _keys,
    _gpus,
    _clock,
)


SETTINGS = {"cls": FlagCommand, "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check ports, limits, shared memory, devices and packages; exit code 1 if something will not work.

    Also takes the flags of `serve`, to check the ports and directories that they name.
    """
    options = resolve_options(list(context.args), os.environ).options
    findings = [*machine_findings(options), *_backend_findings(options.backend_directory)]
    if as_json:
        print_json(
            [
                {"level": each.level.value, "subject": each.subject, "found": each.found, "advice": each.advice}
                for each in findings
            ]
        )
    else:
        _print(findings)
    if any(each.level is FindingLevel.PROBLEM for each in findings):
        raise typer.Exit(1)


def _backend_findings(directories: Iterable[str]) -> list[Finding]:
    """The findings of each installed backend about this machine."""
    places = [Path(directory) for directory in directories]
    findings: list[Finding] = []
    for listing in list_backends(places):
        subject = f"backend {listing.name}"
        if listing.missing_library:
            advice = f"pip install 'modelserver-py[{listing.extra}]'" if listing.extra else ""
            findings.append(Finding(FindingLevel.OK, subject, f"not installed: {listing.missing_library}", advice))
            continue
        try:
            backend = find_backend(listing.name, backend_directories=places)
        except ServerError as error:
            findings.append(Finding(FindingLevel.PROBLEM, subject, error.message))
            continue
        findings.append(Finding(FindingLevel.OK, subject, f"from {listing.source}"))
        findings += backend.diagnose()
    return findings


def _print(findings: list[Finding]) -> None:
    print_table(("", "subject", "found"), [(each.level.value, each.subject, each.found) for each in findings])
    advised = [each for each in findings if each.advice]
    if advised:
        print_line("")
    for each in advised:
        print_line(f"{each.level.value}: {each.subject}: {each.advice}")
    if all(each.level is FindingLevel.OK for each in findings):
        print_line("nothing is amiss")
