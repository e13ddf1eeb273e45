"""Every difference from Triton that is meant, and why. A difference that no rule covers fails its case."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Differences in facts whose paths match one of `facts`, of cases whose names match one of `cases`.

    `pair`: only where the values are these, Triton's and ours.
    """

    is_better: bool
    reason: str
    cases: tuple[str, ...]
    facts: tuple[str, ...] = ("*",)
    pair: tuple[Any, Any] | None = None

    def covers(self, case: str, path: str, pair: tuple[Any, Any]) -> bool:
        return (
            (self.pair is None or self.pair == pair)
            and any(fnmatchcase(path, pattern) for pattern in self.facts)
            and any(fnmatchcase(case, pattern) for pattern in self.cases)
        )


def _better(reason: str, *cases: str, facts: tuple[str, ...] = ("*",), pair: tuple[Any, Any] | None = None) -> Rule:
    return Rule(True, reason, cases, facts, pair)


def _different(reason: str, *cases: str, facts: tuple[str, ...] = ("*",), pair: tuple[Any, Any] | None = None) -> Rule:
    return Rule(False, reason, cases, facts, pair)


_STATUS = ("status",)
_SAYS = ("says.*",)

RULES: tuple[Rule, ...] = (
    # Refusals over HTTP.
    _better("a request that is not valid is the client's fault", "*", facts=_STATUS, pair=(500, 400)),
    _better("the text names the tensor", "data too * (http-json)", "no data (http-*)", facts=_SAYS),
    _better("what does not exist is missing, not bad", "*", facts=_STATUS, pair=(400, 404)),
    _better("the text names model and version", "*: ready of *", facts=_SAYS),
    _better("the address alone says what runs", "GET /", facts=_STATUS, pair=(404, 200)),
    # Data.
    _better("binary data asked for is binary, empty or not", "no elements (*", "no texts (*", "http: raw and empty"),
    _better("newer Tritons refuse an output that is asked for twice", "an output twice (*", "http: an output twice, *"),
    _better("who reads outputs by their place finds them as they were asked for", "outputs in another order (*"),
    _better(
        "values that the datatype cannot hold are refused", "http: an integer beyond its type", "http: a huge float"
    ),
    _better("bytes that are no text are not sent as one", "http: bytes that are no text"),
    _better("no body is no request", "http: no body"),
    _better("a body is what its encoding says", "http: gzip that is none"),
    _better("what belongs to no input is refused", "grpc: a raw part too many"),
    _better("a version is a number", "version '1.0' (*"),
    _better("unsigned numbers are ids of sequences over both protocols", "grpc: an unsigned sequence"),
    _better("data in two places is refused, whether or not the region is there", "a region and data (grpc-raw)"),
    _better("no classes are no classes over both protocols", "no classes (grpc-*"),
    # Answers.
    _better(
        "a decoupled model that answers once can be asked as others", "a decoupled model (*", "a decoupled ensemble (*"
    ),
    _better("a float is a parameter", "failing: float parameter (*"),
    _better(
        "an ensemble's answers have no parameters of a sequence that is none",
        "an ensemble (*",
        "one output of an ensemble (*",
        "a step that fails: * (*",
        "*ensemble*",
        facts=("*parameters*", "*sequence_*"),
    ),
    _better(
        "an ensemble's outputs come in the order of its config, not of a hash", "an ensemble (*", facts=("outputs.*",)
    ),
    _better("an empty final response names its version", "stream: *, final wanted", facts=("answers.*.version",)),
    # Generate.
    _better("several responses where one fits are an error in the status too", "http: generate: *", pair=(200, 501)),
    _better(
        "several responses where one fits are an error in the status too",
        "http: generate: three responses",
        "http: generate: no response",
        "http: generate: an error after two",
        "http: generate: a decoupled ensemble",
    ),
    _better("failures keep their codes", "http: generate*: a failure*", facts=_STATUS),
    _better("data may be nested as the input is", "http: generate*: nested arrays"),
    # BLS and pb_utils.
    _better(
        "a failed call keeps its code and says what failed", "a call *", "a plain call *", facts=("outputs.0.data.0.*",)
    ),
    _better(
        "an error after responses is told, not swallowed", "a decoupled call that fails*", facts=("outputs.0.data.0*",)
    ),
    _better("a tensor tells its shape and its datatype", "pb_utils: tensor *"),
    _better("responses have parameters", "pb_utils: response parameters (*"),
    # Documents.
    # With `--layout routed`.
    _different(
        "a router adds the client's address",
        "forwarded: *",
        facts=("x-forwarded-for", "x-modelserver-router-hops", "."),
    ),
    _different("the version is our own", "server metadata *", facts=("*version",)),
    _better(
        "an extension that is off is not told as one that is served", "server metadata *", facts=("*.extensions.*",)
    ),
    _better(
        "a body tells what is ready, what is not and why; who looks at the status sees the same",
        "GET *",
        "POST *",
        "DELETE *",
        "http: ready of *",
        facts=("type", "is_empty", "body.*"),
    ),
    _better(
        "a slash at the end, a list of models, an escaped name",
        "GET /v2/",
        "GET /v2/models",
        "GET /v2/models/ech%6f",
        facts=_STATUS,
    ),
    _better(
        "a config is told as it is in force, defaults included",
        "*: config of sequence_oldest",
        facts=("*.max_candidate_sequences",),
    ),
    _better(
        "a config is told as it is in force, defaults included",
        "*: config of sequence_state",
        facts=("*sequence_batching.direct*",),
    ),
    _better(
        "dimensions are numbers everywhere", "http: config of *", facts=("*.initial_state.*.dims.*",), pair=("1", 1)
    ),
    _better("a field of newer Tritons", "http: config of *", facts=("*.max_inflight_requests",)),
    # Statistics and metrics.
    _better("a response without its output has failed", "statistics: counted_failing", "metrics: counted_failing"),
    _better(
        "a request whose last response is an error has failed", "statistics: counted_repeat", "metrics: counted_repeat"
    ),
    _better(
        "refused steps of a sequence are failures",
        "statistics: counted_sequence",
        "metrics: counted_sequence",
        facts=("*fail*",),
    ),
    _better(
        "a request to an ensemble waits in no queue, and no time is told as if it did",
        "statistics: counted_ensemble",
        facts=("*.inference_stats.queue.ns",),
    ),
    _better("the memory of a model's processes is told", "statistics: *", facts=("*.memory_usage*",)),
    _better("the time of a load is told", "metrics: *", facts=("nv_model_load_duration_secs*",)),
    _better(
        "the time to the first response is told without being asked for",
        "metrics: families",
        facts=("nv_inference_first_response_histogram_ms",),
    ),
    _better("newer Tritons tell it of every model", "metrics: *", facts=("nv_inference_first_response_histogram_ms*",)),
    # Flags.
    _better("an empty header is empty", "forwarded: an empty one (http)", pair=(" ", "")),
    _better("what only grows is a counter", "cache: families", pair=("gauge", "counter")),
    # Model control.
    _better("an unknown repository is not all of them", "index: of a repository"),
    _better("what does not exist is missing", "control: nothing", facts=("*.status",), pair=(500, 404)),
    _better(
        "what does not exist is missing",
        "control: of nothing over gRPC",
        facts=("*.code",),
        pair=("INTERNAL", "NOT_FOUND"),
    ),
    _better("a load that cannot be is the client's fault", "control: *", facts=("*.status",), pair=(500, 400)),
    _better("the index tells why a model did not load", "control: load bad_*", facts=("*.index*",)),
    _better("a model that cannot execute does not load", "control: load bad_no_execute"),
    # Modes of the repository.
    _different(
        "a config that is wrong is the model's fault, of no version", "ragged: index of *", facts=("*.version",)
    ),
    _better("the index tells why a change was not taken", "poll: a config breaks", facts=("index.*.reason",)),
    _better("a model that was taken away is told as unloaded, not as one that never was", "poll: a model goes"),
    _better("the index tells in which repository a model is", "spaces: index", facts=("*.repository",)),
    _better(
        "an ensemble's answers have no parameters of a sequence that is none",
        "spaces: * finds its own part",
        facts=("*parameters*", "*sequence_*"),
    ),
    _different("the config of a step is told as it is written", "spaces: config of *", facts=("*.model_namespace",)),
    _better("a field of newer Tritons", "spaces: config of *", facts=("*.max_inflight_requests",)),
    _better("statistics of all models tell of those in namespaces too", "spaces: statistics"),
    # Settings.
    _better("settings that cannot be are refused", "extension: a bad *", "extension: an unknown *"),
)


def rule_for(case: str, path: str, pair: tuple[Any, Any]) -> Rule | None:
    """The first rule that covers this difference."""
    return next((rule for rule in RULES if rule.covers(case, path, pair)), None)
