"""Compares two models on the same samples: outputs, accuracy, latency and size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from modelserver.config.schema import ModelConfig
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError, ServerError
from modelserver.toolkit.loaded_model import LoadedModel
from modelserver.toolkit.samples import Array, Samples, request_rows

# Time that is measured for each number of rows, and in how many turns of both models: what else the machine does meets
# both. A turn has some requests at least, and no more than are of use.
MEASURE_S = 2.0
NUM_TURNS = 6
MIN_REQUESTS, MAX_REQUESTS = 2, 200
# Below this a value counts as zero, and a relative error says nothing.
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one output of the new model is from the old one's. `agreement` is the share of equal answers: of the
    largest element along the last dimension for numbers with a fraction, of all elements for `is_discrete` ones.
    """

    output: str
    max_abs: float
    max_rel: float
    mean_abs: float
    agreement: float
    is_discrete: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one request of `rows`, the median of requests sent one by one to both models in turn."""

    rows: int
    before_ms: float
    after_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How answers before and after agree, and which are right: shares from 0 to 1, None without labels."""

    differences: tuple[Difference, ...]
    num_samples: int
    accuracy_before: float | None = None
    accuracy_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Parity):
    """Everything that a conversion tells."""

    before_bytes: int
    after_bytes: int
    latencies: tuple[Latency, ...]

    @property
    def max_rel(self) -> float:
        return max((difference.max_rel for difference in self.differences), default=0.0)


def answers(model: LoadedModel, samples: Samples) -> dict[str, Array]:
    """The outputs for all samples, each [count, ...]. Raises the model's error, ServerError for shapes that vary."""
    parts: dict[str, list[Array]] = {}
    has_batch = bool(model.config.max_batch_size)
    for arrays in samples.requests(model.config):
        for name, array in model.infer(arrays).items():
            parts.setdefault(name, []).append(array if has_batch else array[None])
    try:
        return {name: np.concatenate(found) for name, found in parts.items()}
    except ValueError:
        raise ServerError(f"model '{model.name}': outputs of varying shape cannot be compared") from None


def _joined(one: Mapping[str, Array], other: Mapping[str, Array]) -> dict[str, Array]:
    """Answers and further answers of the same model. Raises ServerError for shapes that vary."""
    try:
        return {name: np.concatenate((array, other[name])) for name, array in one.items()}
    except ValueError:
        raise ServerError("outputs whose shape varies with the batch cannot be compared") from None


def differences(before: Mapping[str, Array], after: Mapping[str, Array]) -> tuple[Difference, ...]:
    """Output by output. Raises ServerError when the outputs are not the same ones, or of another shape."""
    if set(before) != set(after):
        raise ServerError(f"the new model has the outputs {sorted(after)}, the old one {sorted(before)}")
    return tuple(_difference(name, before[name], after[name]) for name in before)


def _difference(name: str, before: Array, after: Array) -> Difference:
    if before.shape != after.shape:
        raise ServerError(
            f"output '{name}' is {list(after.shape)} of the new model, {list(before.shape)} of the old one"
        )
    if before.dtype == object or before.dtype.kind == "b":
        equal = float(np.mean(before == after)) if before.size else 1.0
        return Difference(name, 1.0 - equal, 1.0 - equal, 1.0 - equal, equal, is_discrete=True)
    one, other = before.astype(np.float64), after.astype(np.float64)
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return Difference(name, float("inf"), float("inf"), float("inf"), _agreement(before, after))
    gap = np.abs(np.where(np.isfinite(one), one, 0.0) - np.where(np.isfinite(other), other, 0.0))
    # Relative to the largest value of the output: single elements close to zero would say anything.
    scale = max(float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one))), _TINY)
    most = float(gap.max(initial=0.0))
    mean = float(gap.mean()) if gap.size else 0.0
    return Difference(name, most, most / scale, mean, _agreement(before, after), before.dtype.kind != "f")


def _agreement(before: Array, after: Array) -> float:
    if not before.size:
        return 1.0
    if before.dtype.kind == "f" and before.ndim > 1 and before.shape[-1] > 1:
        return float(np.mean(before.argmax(-1) == after.argmax(-1)))
    if before.dtype.kind == "f":
        return float(np.mean(np.isclose(before, after, rtol=1e-2, atol=1e-3)))
    return float(np.mean(before == after))


def accuracy(outputs: Mapping[str, Array], labels: Array, output: str) -> float:
    """Share of samples whose answer is the label: the output if that is a whole number, else its largest element."""
    found = outputs[output]
    flat = found.reshape(len(found), -1)
    predicted = flat[:, 0] if found.dtype.kind in "iu" and flat.shape[1] == 1 else flat.argmax(1)
    return float(np.mean(predicted == labels))


def label_output(config: ModelConfig, wanted: str = "") -> str:
    """The output that is compared with labels: the one named, else the first of one integer or of classes.

    Raises InvalidArgumentError when there is none.
    """
    names = [spec.name for spec in config.output]
    if wanted:
        if wanted not in names:
            raise InvalidArgumentError(
                f"--label-output: no output '{wanted}'{nearest_hint(wanted, names)} (the model has {', '.join(names)})"
            )
        return wanted
    for spec in config.output:
        size = int(np.prod([max(dim, 0) for dim in spec.dims])) if spec.dims else 1
        kind = spec.data_type.numpy.kind if spec.data_type is not None else ""
        if (kind in "iu" and size == 1) or (kind == "f" and size > 1):
            return spec.name
    raise InvalidArgumentError(
        f"which output are the labels for? None is a class or has one number per class ({', '.join(names)}): "
        "say it with --label-output"
    )


def accuracies(
    config: ModelConfig, samples: Samples, answers: tuple[Mapping[str, Array], Mapping[str, Array]], wanted: str = ""
) -> tuple[float | None, float | None]:
    """Of the answers before and after; None without labels. Raises InvalidArgumentError as `label_output` does."""
    if samples.labels is None:
        return None, None
    name = label_output(config, wanted)
    return accuracy(answers[0], samples.labels, name), accuracy(answers[1], samples.labels, name)


def latencies(
    before: LoadedModel, after: LoadedModel, samples: Samples, *, seconds: float = MEASURE_S
) -> tuple[Latency, ...]:
    """Of one row, and of the largest batch that both take. Both are asked in turn, so that what else the machine does
    meets both.
    """
    most = min(request_rows(before.config), request_rows(after.config))
    return tuple(_latency(before, after, samples, rows, seconds) for rows in sorted({1, most}))


def _latency(before: LoadedModel, after: LoadedModel, samples: Samples, rows: int, seconds: float) -> Latency:
    repeated = _at_least(samples, rows)
    feeds = [next(iter(repeated.requests(model.config, rows))) for model in (before, after)]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(NUM_TURNS):
        # The order of the models alternates, too.
        for place in (0, 1) if number % 2 else (1, 0):
            model = (before, after)[place]
            # The other model's threads may still look for work for a moment.
            model.infer(feeds[place])
            times[place].extend(_turn(model, feeds[place], seconds / NUM_TURNS / 2))
    return Latency(rows, statistics.median(times[0]), statistics.median(times[1]))


def _turn(model: LoadedModel, feed: Mapping[str, Array], seconds: float) -> list[float]:
    """Milliseconds of request after request."""
    taken: list[float] = []
    deadline_s = time.perf_counter() + seconds
    while len(taken) < MIN_REQUESTS or (len(taken) < MAX_REQUESTS and time.perf_counter() < deadline_s):
        began_s = time.perf_counter()
        model.infer(feed)
        taken.append((time.perf_counter() - began_s) * 1e3)
    return taken


def _at_least(samples: Samples, count: int) -> Samples:
    """The samples, repeated up to the given number."""
    times = -(-count // max(samples.count, 1))
    arrays = {name: np.concatenate([array] * times) if times > 1 else array for name, array in samples.arrays.items()}
    return Samples(arrays)


def compare(
    before: LoadedModel,
    after: LoadedModel,
    samples: Samples,
    *,
    sizes: tuple[int, int],
    output: str = "",
    measure_s: float = MEASURE_S,
) -> Comparison:
    """Compare outputs, accuracy if labels are given, and latency. `sizes` are bytes before and after."""
    one, other = answers(before, samples), answers(after, samples)
    # Compilers treat a row alone apart from batches.
    alone = [answers(model, samples.head(1)) for model in (before, after)]
    shares = accuracies(before.config, samples, (one, other), output)
    return Comparison(
        before_bytes=sizes[0],
        after_bytes=sizes[1],
        differences=differences(_joined(one, alone[0]), _joined(other, alone[1])),
        latencies=latencies(before, after, samples, seconds=measure_s) if measure_s else (),
        num_samples=samples.count,
        accuracy_before=shares[0],
        accuracy_after=shares[1],
    )


Row = tuple[str, ...]


def summary_rows(comparison: Comparison) -> list[Row]:
    """Rows of (what, before, after, change)."""
    latencies = [
        ratio_row(f"latency, {one.rows} row{'s' if one.rows > 1 else ''}", one.before_ms, one.after_ms, ms_text)
        for one in comparison.latencies
    ]
    size = ratio_row("size", comparison.before_bytes, comparison.after_bytes, bytes_text)
    return [size, *latencies, *accuracy_rows(comparison)]


def accuracy_rows(parity: Parity) -> list[Row]:
    """The row of accuracy, if there were labels."""
    before, after = parity.accuracy_before, parity.accuracy_after
    if before is None or after is None:
        return []
    name = f"accuracy, {parity.num_samples} sample{'s' if parity.num_samples > 1 else ''}"
    return [(name, f"{before:.2%}", f"{after:.2%}", f"{(after - before) * 100:+.2f} points")]


def difference_rows(parity: Parity) -> list[Row]:
    """Rows of (output, max abs, max rel, mean abs, agreement)."""
    return [
        (one.output, f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.mean_abs:.3g}", f"{one.agreement:.2%}")
        for one in parity.differences
    ]


def ratio_row(what: str, before: float, after: float, text: Callable[[float], str]) -> Row:
    """A row of (what, before, after, change in percent)."""
    change = f"{(after / before - 1) * 100:+.1f} %" if before else ""
    return (what, text(before), text(after), change)


def bytes_text(count: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def ms_text(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms" if milliseconds < 10 else f"{milliseconds:.1f} ms"


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON."""
    return {
        "size_bytes": {"before": comparison.before_bytes, "after": comparison.after_bytes},
        "latency_ms": [
            {"rows": one.rows, "before": one.before_ms, "after": one.after_ms} for one in comparison.latencies
        ],
        **parity_document(comparison),
    }


def parity_document(parity: Parity) -> dict[str, object]:
    """How answers agree, as JSON."""
    return {
        "accuracy": None
        if parity.accuracy_before is None
        else {"before": parity.accuracy_before, "after": parity.accuracy_after},
        "num_samples": parity.num_samples,
        "outputs": [_document(difference) for difference in parity.differences],
    }


def _document(difference: Difference) -> dict[str, object]:
    return {
        "name": difference.output,
        "max_abs": difference.max_abs,
        "max_rel": difference.max_rel,
        "mean_abs": difference.mean_abs,
        "agreement": difference.agreement,
    }
