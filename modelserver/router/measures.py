"""The router's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric

from modelserver.endpoints.endpoint import Endpoint, EndpointState
from modelserver.endpoints.membership import Membership
from modelserver.router.replicas import Replicas


def router_families(replicas: Replicas, membership: Membership, version: str) -> Iterator[Metric]:
    """All families, those by endpoint at the end."""
    info = Metric("modelserver_router_info", "Version of the router", "gauge")
    info.add_sample(info.name, {"version": version}, 1)
    yield info
    counts = replicas.counts
    age_s = membership.age_s
    gauges = (
        ("pending_requests", "Requests in the router, with a replica or waiting for one", counts.num_active),
        ("waiting_requests", "Requests that wait because no replica is ready", replicas.num_waiting),
        ("membership_age_seconds", "How long the source of replicas has failed; 0 while it works", age_s or 0.0),
    )
    for name, text, value in gauges:
        yield _family(f"modelserver_router_{name}", text, "gauge", (({}, value),))
    counters = (
        ("requests", "Requests received", counts.num_requests),
        ("retries", "Requests sent again to another replica", counts.num_retries),
        ("lost_requests", "Requests lost with a replica that may have processed them", counts.num_lost),
        ("broken_answers", "Answers that had begun when their replica was lost", counts.num_broken_streams),
        ("unserved_requests", "Requests for which there was no replica", counts.num_unserved),
    )
    for name, text, value in counters:
        yield _family(f"modelserver_router_{name}", text, "counter", (({}, value),))
    choices = (("session", counts.num_by_session), ("prompt", counts.num_by_prompt), ("learned", counts.num_by_learned))
    yield _family(
        "modelserver_router_choices",
        "Choices by a sequence or session, by the hash of a prompt, and those of them by what was learned of prompts",
        "counter",
        [({"by": name}, value) for name, value in choices],
    )
    yield from _endpoint_families(replicas)


def _endpoint_families(replicas: Replicas) -> Iterator[Metric]:
    members = [(each, {"endpoint": each.address}) for each in replicas.endpoints.endpoints]
    prefix = "modelserver_router_endpoint"
    numbers: tuple[tuple[str, str, str, Callable[[Endpoint], float]], ...] = (
        ("outstanding", "gauge", "Requests that the replica has", lambda each: each.outstanding),
        ("latency_seconds", "gauge", "Moving average of the time to an answer", lambda each: each.latency_s),
        ("ejections", "counter", "How often the replica was ejected", lambda each: each.num_ejections),
    )
    yield _family(
        f"{prefix}_state",
        "1 for the state that the replica is in",
        "gauge",
        [
            ({**labels, "state": state.value}, int(each.state is state))
            for each, labels in members
            for state in EndpointState
        ],
    )
    for name, kind, text, read in numbers:
        yield _family(f"{prefix}_{name}", text, kind, [(at, read(each)) for each, at in members])
    yield _family(
        f"{prefix}_requests",
        "Requests to the replica, by how they ended",
        "counter",
        [({**at, "outcome": outcome.value}, count) for each, at in members for outcome, count in each.outcomes.items()],
    )


def _family(name: str, text: str, kind: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
    metric = Metric(name, text, kind)
    for labels, value in samples:
        metric.add_sample(f"{name}_total" if kind == "counter" else name, labels, value)
    return metric
