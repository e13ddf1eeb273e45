"""Random ensembles against what NumPy makes of the same graph, whatever order steps answer in."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ensembles import Ensemble, StepDouble, ensemble_config, model_config, step

from modelserver.config.ensemble_models import check_models
from modelserver.config.schema import EnsembleStep
from modelserver.config.validate import validate

INPUTS = ("A", "B")
FLAGS = ("F", "G")


@dataclass(frozen=True)
class Node:
    """A step that adds up some tensors, and its number, where its condition holds."""

    sources: tuple[str, ...]
    condition: str
    target: str


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Nodes in some order of their needs. Some tensors have two writers, with conditions that exclude each other."""
    nodes: list[Node] = []
    tensors = list(INPUTS)
    for number in range(draw(st.integers(1, 7))):
        sources = tuple(draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3)))
        condition = draw(st.sampled_from(["", "", "F", "!F", "G", "!G"]))
        target = f"t{number}"
        nodes.append(Node(sources, condition, target))
        if condition and draw(st.booleans()):
            other = condition.removeprefix("!") if condition.startswith("!") else f"!{condition}"
            nodes.append(Node(tuple(draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=2))), other, target))
        tensors.append(target)
    return nodes


def evaluate(nodes: list[Node], values: dict[str, Any], flags: dict[str, bool]) -> dict[str, int]:
    """What the graph comes to; a tensor that is not there stays out."""
    there = dict(values)
    for number, node in enumerate(nodes):
        name = node.condition.removeprefix("!")
        holds = not node.condition or flags[name] is not node.condition.startswith("!")
        if holds and all(source in there for source in node.sources):
            there[node.target] = sum(there[source] for source in node.sources) + number
    return {name: value for name, value in there.items() if name not in INPUTS}


def adder(number: int, num_inputs: int) -> StepDouble:
    inputs = tuple(f"X{index}" for index in range(num_inputs))
    return StepDouble(model_config(f"add{number}", inputs=inputs))


@settings(max_examples=150, deadline=None)
@given(graphs(), st.booleans(), st.booleans(), st.randoms(use_true_random=False), st.data())
def test_a_random_ensemble_computes_what_its_graph_says(
    nodes: list[Node], flag_f: bool, flag_g: bool, order: random.Random, data: st.DataObject
) -> None:
    targets = list(dict.fromkeys(node.target for node in nodes))
    placed = list(enumerate(nodes))
    order.shuffle(placed)  # the order of the config does not matter
    steps: list[EnsembleStep] = []
    models: list[StepDouble] = []
    conditions: dict[str, str] = {}
    for position, (number, node) in enumerate(placed):
        models.append(adder(number, len(node.sources)))
        steps.append(step(f"add{number}", {f"X{i}": name for i, name in enumerate(node.sources)}, {"Y": node.target}))
        if node.condition:
            conditions[f"step{position}"] = node.condition
    # Whatever no step reads is left out, or the config would be wrong.
    used = {name for node in nodes for name in node.sources} | {node.condition.removeprefix("!") for node in nodes}
    inputs, bools = tuple(sorted(used & {*INPUTS})), tuple(sorted(used & {*FLAGS}))
    config = ensemble_config(*steps, inputs=inputs, bools=bools, outputs=targets, **conditions)
    assert not validate(config)
    by_name = {model.name: model.config for model in models}
    assert not check_models(config, lambda item: by_name[item.model_name])

    ensemble = Ensemble(config, *models)
    asked = tuple(data.draw(st.lists(st.sampled_from(targets), unique=True, min_size=1)))
    values, flags = {"A": 3, "B": 100}, {"F": flag_f, "G": flag_g}
    given_values = {name: values[name] for name in inputs} | {name: flags[name] for name in bools}
    answer = ensemble.submit(outputs=asked, **given_values)
    numbers = {model.name: number for (number, _), model in zip(placed, models, strict=True)}
    while not answer.responses:
        waiting = [model for model in models if model.waiting]
        assert waiting, "the run stands still"
        model = order.choice(waiting)
        total = sum(int(value.data[0]) for value in model.waiting[0].inputs.values())
        model.answer(Y=np.array([total + numbers[model.name]]))
    expected = evaluate(nodes, values, flags)
    assert answer.only == {name: [expected[name]] for name in targets if name in asked and name in expected}
    assert ensemble.scheduler.inflight == 0
    assert all(model.num_holders == 1 for model in models)
