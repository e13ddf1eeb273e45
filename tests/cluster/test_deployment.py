"""Deployment files: what they may hold, and the errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelserver.cluster.deployment import changes, parse_deployment, read_deployment
from modelserver.errors import InvalidArgumentError
from modelserver.options.router_options import resolve_router_options

EXAMPLE = Path(__file__).resolve().parents[2] / "docker" / "ray" / "deploy.yaml"


def document(**pool: Any) -> dict[str, Any]:
    return {"pools": [{"name": "p", "repository": "models", **pool}]}


def test_the_example_is_valid_and_its_paths_are_relative_to_it() -> None:
    deployment = read_deployment(EXAMPLE)
    assert [pool.name for pool in deployment.pools] == ["digits", "echo"]
    assert all(Path(each).is_dir() for pool in deployment.pools for each in pool.repositories)


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(
        "pools:\n- {name: p, repository: [m, 's3://b/m'], resources: {memory: 1.5Gi, custom: {slot: 1}}}\n"
    )
    (tmp_path / "d.toml").write_text(
        '[[pools]]\nname = "p"\nrepository = ["m", "s3://b/m"]\nresources = {memory = "1.5Gi", custom = {slot = 1}}\n'
    )
    deployment = read_deployment(tmp_path / "d.yaml")
    assert deployment == read_deployment(tmp_path / "d.toml")
    (pool,) = deployment.pools
    assert pool.resources.memory_bytes == 3 << 29
    assert pool.words[3:] == [f"--model-repository={tmp_path / 'm'}", "--model-repository=s3://b/m"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pools": [{"name": "p"}]}, "pools[0]: Object missing required field `repository`"),
        (document(repositry="m"), "pools[0]: Object contains unknown field `repositry`"),
        (document(name="Big_Pool"), "pools[0].name: "),
        (document(replicas={"min": -1}), "pools[0].replicas.min: Expected `int` >= 0"),
        (document(replicas={"min": 3, "max": 2}), "pools[0].replicas: 'max' must be at least 'min', got 2 and 3"),
        (document(replicas={"min": 0}), "pools[0]: 'replicas.min' of 0 needs 'routers'"),
        (document(rollout={"max_surge": 0}), "pools[0].rollout: 'max_surge' and 'max_unavailable' cannot both be 0"),
        (document(resources={"memory": "2GB?"}), "pools[0].resources: 'memory' expects bytes"),
        (document(resources={"cpus": "two"}), "pools[0].resources.cpus: Expected `float`, got `str`"),
        (document(resources={"nodes": 0}), "pools[0].resources.nodes: Expected `int` >= 1"),
        (document(flags=["--nnodes=2"]), "pools[0]: 'flags[0]': --nnodes is set by the cluster"),
        (document(flags=["--log-verbos=1"]), "pools[0]: 'flags[0]': unknown flag '--log-verbos'"),
        (document(flags=["--log-verbose=many"]), "pools[0]: 'flags[0]': Bad option: \"--log-verbose\""),
        (document(flags=["--http-port=1"]), "pools[0]: 'flags[0]': --http-port is set by the cluster"),
        (document(flags=["--tls-cert=f"]), "pools[0]: 'flags[0]': --tls-cert is not supported"),
        (document(flags=["models"]), "pools[0]: 'flags[0]' expects --NAME"),
        (document(routers={"count": 0}), "pools[0].routers.count: Expected `int` >= 1"),
        (document(routers={"flags": ["--to=a"]}), "pools[0].routers: 'flags[0]': --to is set by the cluster"),
        (document(routers={"flags": ["--load-model=a"]}), "pools[0].routers: 'flags[0]': unknown flag '--load-model'"),
        (document(routers={"flags": ["--tls-cert=f"]}), "pools[0].routers: 'flags[0]': --tls-cert is not supported"),
        (document(routers={"resources": {"nodes": 2}}), "pools[0].routers: 'resources.nodes' of a router must be 1"),
        (
            {"pools": [{"name": "p", "repository": "m", "routers": {}}, {"name": "p-router", "repository": "m"}]},
            "'p-router' is the name of the routers of pool 'p'",
        ),
        (document(routers=["router:8000"]), "pools[0]: 'routers' expects http://HOST:PORT, got 'router:8000'"),
        ({"pools": [*document()["pools"], *document()["pools"]]}, "'pools' has two of the name 'p'"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_errors_name_the_field(wrong: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_deployment(wrong, "deploy.yaml")
    assert raised.value.message.startswith(f"deploy.yaml: {message}")


def test_routers_of_a_pool_are_a_pool_of_their_own() -> None:
    url = "http://head:8003/cluster/v1/endpoints?pool=p"
    pool = parse_deployment(document(replicas={"min": 0}, routers={"count": 2, "flags": ["--balance=round_robin"]}), "")
    routers = pool.pools[0].router_pool(url)
    assert routers is not None
    assert (routers.name, routers.command, routers.replicas.min) == ("p-router", "route", 2)
    options = resolve_router_options(routers.words, {})
    assert (options.routing.discover, options.routing.balance) == (url, "round_robin")
    assert options.routing.wait_for_replica_secs == 300  # the first replica may take so long to start
    assert (options.server.http_port, options.server.grpc_port, options.server.reuse_http_port) == (8000, 8001, True)
    assert parse_deployment(document(routers=["http://a:1"]), "").pools[0].router_pool(url) is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        read_deployment(tmp_path / "none.yaml")
    (tmp_path / "d.yaml").write_text("pools: [")
    with pytest.raises(InvalidArgumentError, match=r"d\.yaml"):
        read_deployment(tmp_path / "d.yaml")


def test_only_what_makes_a_server_changes_the_revision() -> None:
    def revision(**pool: Any) -> str:
        return parse_deployment(document(**pool), "").pools[0].revision

    assert revision() == revision(replicas={"max": 7}, rollout={"max_surge": 2})
    different = [{"version": "2"}, {"flags": ["--log-verbose=1"]}, {"env": {"A": "1"}}, {"resources": {"cpus": 2}}]
    assert len({revision(), *(revision(**each) for each in different)}) == 5


def test_changes_are_told_before_they_are_made() -> None:
    before = parse_deployment({"pools": [*document()["pools"], {"name": "q", "repository": "m"}]}, "")
    after = parse_deployment(document(version="2", replicas={"max": 4}), "")
    first, second = changes(before, after)
    assert first.startswith("pool p: replace the replicas (")
    assert first.endswith("): version, replicas changed")
    assert second == "pool q: drain and stop all replicas"
    assert list(changes(before, before)) == ["pool p: unchanged", "pool q: unchanged"]
    assert next(changes(None, after)).startswith("pool p: start 1 to 4 replicas")
