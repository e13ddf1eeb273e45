"""`modelserver deploy` and `modelserver cluster status | scale | drain | logs | top | down`: servers and Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, print_json, print_line, print_table
from modelserver.cluster.control import ControllerClient, connected
from modelserver.cluster.deployment import Deployment, changes, read_deployment
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError

_POLL_S = 0.5
_MAX_PROBLEM = 80
_COLUMNS = ("replica", "state", "for", "requests", "revision", "version", "node", "address", "problem")

Address = Annotated[
    str,
    typer.Option("--address", envvar="RAY_ADDRESS", help="Address of the Ray cluster; auto: the one of this machine."),
]
Wait = Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait until it is done; 0: do not wait.")]


def deploy(
    file: Annotated[Path, typer.Argument(help="Deployment file, in YAML or TOML (docs/scale.md).")],
    address: Address = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change.")] = False,
    wait_s: Wait = 0.0,
) -> None:
    """Start pools of servers on a Ray cluster, or change those that run, as a file says.

    With --wait the exit code is 1 if a pool went back to its previous servers, or is not ready in time.
    """
    deployment = read_deployment(file)
    with connected(address) as ray:
        if dry_run:
            for sentence in _preview(ray, deployment):
                print_line(sentence)
            return
        controller = ControllerClient(ray, creates=True)
        for sentence in controller.call("deploy", deployment):
            print_line(sentence)
        document = _wait(controller, wait_s, lambda pools: all(pool["settled"] for pool in pools))
        for pool in document["pools"] if wait_s else ():
            if pool["rejected"]:
                raise UnavailableError(f"pool {pool['name']} runs its previous servers: {pool['rejected']}")
        for pool in document["pools"]:
            if pool["is_of_routers"]:
                for each in pool["replicas"]:
                    if each["state"] == "ready":
                        print_line(f"pool {pool['name']}: http://{each['address']}")
            elif pool["discover"] and not pool["leaving"] and not pool["is_routed"]:
                print_line(f"pool {pool['name']}: modelserver route --discover='{pool['discover']}'")


def status(address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the pools and their replicas."""
    with _controller(address) as controller:
        document = controller.call("status")
    if as_json:
        print_json(document)
    else:
        _print_status(document)


def scale(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    count: Annotated[str, typer.Argument(metavar="N|auto", help="Number of replicas; auto: by demand again.")],
    address: Address = "auto",
    wait_s: Wait = 0.0,
) -> None:
    """Have a number of replicas until the next deployment, whatever the demand."""
    if count != "auto" and not (count.isdecimal() and int(count) <= 100_000):
        raise InvalidArgumentError(f"expected a number of replicas or auto, got '{count}'")
    with _controller(address) as controller:
        controller.call("scale", pool, None if count == "auto" else int(count))
        _wait(controller, wait_s, lambda pools: all(each["settled"] for each in pools if each["name"] == pool))


def drain(
    replica: Annotated[str, typer.Argument(help="Name of the replica.")],
    address: Address = "auto",
    wait_s: Wait = 0.0,
) -> None:
    """Replace a replica: another one starts, then this one finishes its requests and ends."""
    with _controller(address) as controller:
        controller.call("drain", replica)
        _wait(
            controller,
            wait_s,
            lambda pools: replica not in {each["name"] for pool in pools for each in pool["replicas"]},
        )


def logs(
    replica: Annotated[str, typer.Argument(help="Name of the replica.")],
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=2000, help="Number of newest lines.")] = 100,
    address: Address = "auto",
) -> None:
    """Print the newest lines that a replica's server has printed."""
    with _controller(address) as controller:
        for line in controller.call("log_lines", replica, num_lines):
            print_line(line)


def top(
    address: Address = "auto",
    interval_s: Annotated[float, typer.Option("--interval", "-d", min=0.1, help="Seconds between updates.")] = 1.0,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Exit after this many updates; 0: until Ctrl-C.")
    ] = 0,
) -> None:
    """Watch the pools and their replicas. Without a terminal it prints one table, or --count of them."""
    is_terminal = sys.stdout.isatty()
    with _controller(address) as controller:
        num_left = count or (-1 if is_terminal else 1)
        try:
            while num_left:
                document = controller.call("status")
                if is_terminal:
                    sys.stdout.write("\x1b[H\x1b[2J")  # to the corner of an empty screen
                _print_status(document)
                num_left -= 1
                if num_left:
                    time.sleep(interval_s)
        except KeyboardInterrupt:
            return


def down(
    address: Address = "auto",
    now: Annotated[bool, typer.Option("--now", help="Kill the servers with the requests that they have.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=1.0, help="Seconds that the replicas have to end.")] = 120.0,
) -> None:
    """Drain all replicas, stop them, and stop the controller."""
    with _controller(address) as controller:
        controller.call("leave", now)
        _wait(controller, wait_s, lambda pools: not pools)
        controller.end()


@contextmanager
def _controller(address: str) -> Iterator[ControllerClient]:
    with connected(address) as ray:
        yield ControllerClient(ray)


def _preview(ray: Any, deployment: Deployment) -> list[str]:
    try:
        return list(ControllerClient(ray).call("preview", deployment))
    except NotFoundError:
        return list(changes(None, deployment))


def _wait(controller: ControllerClient, wait_s: float, is_done: Callable[[list[Any]], bool]) -> dict[str, Any]:
    """The status as soon as its pools are as wanted, or at once if there is nothing to wait for.

    Raises UnavailableError after `wait_s`.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        document: dict[str, Any] = controller.call("status")
        pools = document["pools"]
        if not wait_s or is_done(pools):
            return document
        if time.monotonic() > deadline_s:
            states = "; ".join(f"{pool['name']}: {pool['ready']} of {pool['wanted']} ready" for pool in pools)
            problems = "; ".join(pool["problem"] for pool in pools if pool["problem"])
            raise UnavailableError(f"not done within {wait_s:g} s: {states}" + (f" ({problems})" if problems else ""))
        time.sleep(_POLL_S)


def _print_status(document: dict[str, Any]) -> None:
    for pool in document["pools"]:
        print_line(_headline(pool))
        if pool["rejected"] or pool["problem"]:
            print_line(f"  {pool['rejected'] or pool['problem']}")
        rows = [
            (
                *(each["name"], each["state"], f"{each['seconds']:.0f} s", str(each["ongoing"]), each["revision"]),
                *(each["version"], each["node"], each["address"], each["problem"].partition("\n")[0][:_MAX_PROBLEM]),
            )
            for each in pool["replicas"]
        ]
        if rows:
            print_table(_COLUMNS, rows)
        print_line("")
    if not document["pools"]:
        print_line("no pool is deployed")


def _headline(pool: dict[str, Any]) -> str:
    demand = "unknown" if pool["demand"] is None else pool["demand"]
    text = f"pool {pool['name']}: {pool['ready']} of {pool['wanted']} ready, {demand} requests"
    text += f", revision {pool['revision']}"
    if pool["leaving"]:
        return f"{text}, stopping"
    if pool["rejected"]:
        return f"{text}, rolled back"
    return text if pool["held"] is None else f"{text}, held at {pool['held']}"


cluster = typer.Typer(no_args_is_help=True, help="Look at what is deployed in a Ray cluster, and change it.")
for command in (status, scale, drain, logs, top, down):
    cluster.command()(command)
