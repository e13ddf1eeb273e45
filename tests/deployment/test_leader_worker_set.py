"""A group of pods that share the ranks of a model: each pod's command makes it what it is in its group."""

from __future__ import annotations

from typing import Any

import yaml
from support.deployment import DOCKER

from modelserver.options.sources import resolve_options

GROUP = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "llm-0.llm.default", "MODELSERVER_GROUP_KEY": "k"}


def test_the_first_pod_serves_and_the_others_join_it() -> None:
    path = DOCKER / "lws" / "leaderworkerset.yaml"
    found: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    options = []
    for index, pod in enumerate((leader, worker)):
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["modelserver", "serve"]
        environment = {**GROUP, "LWS_WORKER_INDEX": str(index)}
        options.append(resolve_options(container.get("args", []), environment).options)
    assert [(each.nnodes, each.node_rank) for each in options] == [(template["size"], 0), (template["size"], 1)]
    assert {each.leader for each in options} == {("llm-0.llm.default", 29500)}

    (container,), (other,) = leader["spec"]["containers"], worker["spec"]["containers"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= set(options[0].model_repository)
    for same in ("env", "image", "resources", "volumeMounts"):
        assert container[same] == other[same]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": options[0].http_port, "grpc": options[0].grpc_port, "metrics": options[0].metrics_port}
    # The grace covers the drain, and the worker does not go before its leader.
    graces = {pod["spec"]["terminationGracePeriodSeconds"] for pod in (leader, worker)}
    assert min(graces) > options[0].drain_delay_secs + options[0].exit_timeout_secs
    labels = leader["metadata"]["labels"]
    selector = found["Service"]["spec"]["selector"]
    assert selector.items() <= labels.items()
    assert not selector.items() <= worker["metadata"]["labels"].items()
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= worker["metadata"]["labels"].items() & labels.items()
