"""Whether a model with another setting still says the same: the answers of the served model, before and after."""

from __future__ import annotations

from modelserver.client.endpoint import Endpoint
from modelserver.config.schema import ModelConfig
from modelserver.toolkit.comparison import Parity, accuracies, differences, label_output
from modelserver.toolkit.samples import Samples
from modelserver.toolkit.tuning.served_answers import Outputs, served_answers
from modelserver.toolkit.tuning.tuned_model import TunedModel


def reason_not_to_ask(config: ModelConfig) -> str:
    """Why a model's answers cannot be compared; empty if they can."""
    if config.is_decoupled:
        return "the model is decoupled"
    if config.sequence_batching is not None:
        return "an answer depends on the sequence before it"
    return ""


def check_labels(config: ModelConfig, samples: Samples, wanted: str) -> None:
    """Raise InvalidArgumentError now for labels that fit no output: measuring takes minutes."""
    if samples.labels is not None or wanted:
        label_output(config, wanted)


def compare_settings(
    model: TunedModel,
    endpoint: Endpoint,
    samples: Samples,
    settings: tuple[ModelConfig, ModelConfig],
    *,
    rows: int,
    num_inflight: tuple[int, int],
    output: str,
) -> Parity:
    """The answers with the first setting and with the second one, both under load: requests of `rows` samples, so many
    in flight. The second one serves then. Raises ServerError.
    """
    found: list[Outputs] = []
    for config, count in zip(settings, num_inflight, strict=True):
        model.use(config)
        found.append(served_answers(endpoint, config, samples, rows=rows, num_inflight=count))
    before, after = accuracies(settings[0], samples, (found[0], found[1]), output)
    return Parity(
        differences=differences(found[0], found[1]),
        num_samples=samples.count,
        accuracy_before=before,
        accuracy_after=after,
    )
