"""Finds all problems of a model config that can be found without other files.

Takes a config before or after `defaults.normalise`; never raises. The repository and the backend check
files, devices and other models at load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from modelserver.config.auto_warmup import check_auto_warmup
from modelserver.config.config_limits import ConfigLimits, check_limits
from modelserver.config.defaults import BACKENDS, ENSEMBLE
from modelserver.config.ensemble_rules import check_ensemble
from modelserver.config.instance_rules import check_inline_execution, check_instances, check_warmup
from modelserver.config.on_demand import check_on_demand
from modelserver.config.problem import Locations, Problem, Report, key_path
from modelserver.config.scheduling_rules import check_scheduling
from modelserver.config.schema import ModelConfig, ModelMetrics, ModelVersionPolicy
from modelserver.config.tensor_rules import check_tensors
from modelserver.core.spelling import did_you_mean, suggest

_MODEL_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_LABEL_NAME = re.compile(r"[A-Za-z0-9_]+")
_COMPUTE_CAPABILITY = re.compile(r"[0-9]+\.[0-9]+")


def validate(
    config: ModelConfig,
    *,
    locations: Locations | None = None,
    source: str = "config.pbtxt",
    model_name: str | None = None,
    gpu_ids: Sequence[int] | None = None,
    limits: ConfigLimits | None = None,
) -> tuple[Problem, ...]:
    """Every problem of the config, in the order of its text if `locations` knows it.

    With `model_name` the config's name must be that, or absent; with `gpu_ids` its GPUs must be among them.
    `limits` replace the default limits.
    """
    report = Report(source, locations, config.name or model_name or "")
    _check_name(config, model_name, report)
    if config.is_ensemble:
        check_ensemble(config, report)
    else:
        _check_backend(config, report)
    if config.version_policy is not None:
        _check_version_policy(config.version_policy, report)
    if config.max_batch_size < 0:
        message = f"expected a size >= 0, got {config.max_batch_size}"
        summary = f"'max_batch_size' must be non-negative value for {report.model_name}"
        report.add("max_batch_size", message, summary=summary)
    check_tensors(config, report)
    check_scheduling(config, report)
    check_instances(config, gpu_ids, report)
    check_warmup(config, report)
    check_inline_execution(config, report)
    check_auto_warmup(config, report)
    check_on_demand(config, report)
    check_limits(config, limits or ConfigLimits(), gpu_ids, report)
    _check_files(config, report)
    _check_response_cache(config, report)
    _check_labels(config, report)
    if config.model_metrics is not None:
        _check_metrics(config.model_metrics, report)
    return tuple(sorted(report.problems, key=lambda problem: (problem.line or 0, problem.column or 0)))


def _check_name(config: ModelConfig, model_name: str | None, report: Report) -> None:
    name = config.name
    if not name:
        if model_name is None:
            report.add("name", "expected a name, got none", summary="model configuration must specify 'name'")
    elif model_name is not None and name != model_name:
        message = f"expected '{model_name}', the name of the model's directory, got '{name}'"
        summary = f"unexpected directory name '{model_name}' for model '{name}', directory name must equal model name"
        report.add("name", message, summary=summary)
    elif not _MODEL_NAME.fullmatch(name) or name in (".", ".."):
        report.add("name", f"expected a name without slashes and control characters, got {name!r}")


def _check_backend(config: ModelConfig, report: Report) -> None:
    platform, backend = config.platform, config.backend
    implied = BACKENDS.get(platform)
    if platform and implied is None and not backend:
        names = [*BACKENDS, ENSEMBLE]
        hint = did_you_mean(suggest(platform, names)) or 'name the backend instead: backend: "..."'
        summary = f"unexpected platform type '{platform}' for {report.model_name}"
        report.add("platform", f"expected one of {', '.join(names)}, got {platform}", hint, summary=summary)
    elif backend and implied is not None and implied != backend:
        summary = f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
        message = f"{platform} means backend {implied}, but backend is {backend}"
        report.add("platform", message, "leave platform out", summary=summary)
    elif not backend and not platform:
        hint = 'for example backend: "onnxruntime"'
        summary = f"must specify 'platform' or 'backend' for '{report.model_name}'"
        report.add("backend", "expected the name of a backend, got none", hint, summary=summary)
    if backend and not _MODEL_NAME.fullmatch(backend):
        report.add("backend", f"expected a name without slashes and control characters, got {backend!r}")


def _check_version_policy(policy: ModelVersionPolicy, report: Report) -> None:
    choices = [name for name in ("latest", "all", "specific") if getattr(policy, name) is not None]
    for name in choices[1:]:
        report.add(f"version_policy.{name}", f"cannot be set beside {choices[0]}")
    if policy.specific is None:
        return
    if not policy.specific.versions:
        report.add("version_policy.specific.versions", "expected at least one version, got none")
    for index, version in enumerate(policy.specific.versions):
        if version < 1:
            report.add(f"version_policy.specific.versions[{index}]", f"expected a version >= 1, got {version}")


def _check_files(config: ModelConfig, report: Report) -> None:
    report.check_file("default_model_filename", config.default_model_filename)
    report.check_file("runtime", config.runtime)
    for capability, filename in config.cc_model_filenames.items():
        path = key_path("cc_model_filenames", capability)
        if not _COMPUTE_CAPABILITY.fullmatch(capability):
            report.add(path, f"expected a compute capability such as 8.0 as key, got '{capability}'")
        report.check_name(path, filename, "a file name")
        report.check_file(path, filename)


def _check_response_cache(config: ModelConfig, report: Report) -> None:
    if config.response_cache is None or not config.response_cache.enable:
        return
    if config.sequence_batching is not None:
        message = "responses of a model with sequence_batching cannot be cached"
        report.add("response_cache", message, summary=_uncached(report, "sequence batching scheduler"))
    if config.is_decoupled:
        message = "responses of a decoupled model cannot be cached"
        report.add("response_cache", message, summary=_uncached(report, "'decoupled' transaction policy"))


def _uncached(report: Report, what: str) -> str:
    cannot = f"Response Cache does not currently support model {report.model_name} with {what}"
    return f"{cannot}. Please disable the response cache."


def _check_labels(config: ModelConfig, report: Report) -> None:
    for tag in config.metric_tags:
        if not _LABEL_NAME.fullmatch(tag):
            report.add(key_path("metric_tags", tag), f"expected letters, digits and underscores as key, got '{tag}'")
    if "" in config.parameters:
        report.add(key_path("parameters", ""), "expected a key, got none")
    agents = config.model_repository_agents.agents if config.model_repository_agents else ()
    for index, agent in enumerate(agents):
        report.check_name(f"model_repository_agents.agents[{index}].name", agent.name, "the name of an agent")


def _check_metrics(metrics: ModelMetrics, report: Report) -> None:
    for index, control in enumerate(metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        family = control.metric_identifier.family if control.metric_identifier else ""
        summary = "metric identifier must specify non-empty 'family'"
        if control.metric_identifier is None:
            summary = "metric control must specify 'metric_identifier'"
        report.check_name(f"{path}.metric_identifier.family", family, "the name of a metric", summary=summary)
        if control.histogram_options is None:
            summary = "metric control must specify 'histogram_options'"
            report.add(path, "expected histogram_options, got none", summary=summary)
            continue
        buckets = control.histogram_options.buckets
        where = f"{path}.histogram_options.buckets"
        if not buckets:
            summary = "histogram options must specify non-empty 'buckets'"
            report.add(where, "expected at least one upper bound, got none", summary=summary)
        for position, bound in enumerate(buckets):
            if not math.isfinite(bound):
                report.add(f"{where}[{position}]", f"expected a finite upper bound, got {bound}")
            elif position and not bound > buckets[position - 1]:
                previous = buckets[position - 1]
                report.add(
                    f"{where}[{position}]", f"expected a bound above the one before ({previous:g}), got {bound:g}"
                )
