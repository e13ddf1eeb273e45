"""Small models of tables, each trained and written by its own library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

# The libraries take ten seconds to import, which the processes that run other tests would pay too.
if TYPE_CHECKING:
    import lightgbm
    import pandas as pd
    import xgboost

ROWS = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
TWO = (ROWS[:, 0] > 0).astype(np.int64)
THREE = np.digitize(ROWS[:, 1], [-0.5, 0.5])
NAMES = np.array(["high", "low", "medium"])
TEXTS = ["good and fine", "bad and ugly", "fine fine", "ugly"]
FIL = """
backend: "fil"
max_batch_size: 64
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ %d ] } ]
instance_group [ { kind: KIND_AUTO } ]
parameters [
  { key: "model_type" value: { string_value: "%s" } },
  { key: "output_class" value: { string_value: "%s" } },
  { key: "predict_proba" value: { string_value: "%s" } },
  { key: "threshold" value: { string_value: "0.7" } },
  { key: "storage_type" value: { string_value: "AUTO" } }
]
dynamic_batching { }
"""


@dataclass(frozen=True)
class Trained:
    """The repository, and the models by their names as their libraries have them."""

    repository: Path
    models: dict[str, Any]


def people_table() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"age": np.linspace(20, 60, 60), "city": NAMES[THREE]})


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def boost(objective: str, labels: Any, **settings: Any) -> xgboost.Booster:
    import xgboost

    settings |= {"objective": objective, "nthread": 1, "max_depth": 3}
    return xgboost.train(settings, xgboost.DMatrix(ROWS, label=labels), 5)


def light(objective: str, labels: Any, **settings: Any) -> lightgbm.Booster:
    import lightgbm

    settings |= {"objective": objective, "num_threads": 1, "min_data_in_leaf": 2, "verbose": -1}
    return lightgbm.train(settings, lightgbm.Dataset(ROWS, label=labels.copy()), 5)


def train_sklearn(place: Callable[..., Path]) -> None:
    """Train what scikit-learn makes; `place(name, file, model, config)` says where each is written."""
    import joblib
    import pandas as pd
    import skops.io
    from sklearn.cluster import KMeans
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    logistic = LogisticRegression().fit(ROWS, NAMES[THREE])
    skops.io.dump(logistic, place("logistic", "model.skops", logistic))
    forest = make_pipeline(StandardScaler(), RandomForestClassifier(5, max_depth=3, n_jobs=2, random_state=0)).fit(
        ROWS, THREE
    )
    joblib.dump(forest, place("forest", "model.joblib", forest))
    linear = LinearRegression().fit(ROWS, np.stack([ROWS[:, 0], ROWS[:, 1] * 3], axis=1))
    skops.io.dump(linear, place("linear", "model.skops", linear, parameter("execution", "onnx")))
    scaler = StandardScaler().fit(ROWS)
    skops.io.dump(scaler, place("scaler", "model.skops", scaler))
    clusters = KMeans(2, n_init=1).fit(ROWS)
    skops.io.dump(clusters, place("clusters", "model.skops", clusters, parameter("execution", "native")))
    columns = ColumnTransformer([("city", OneHotEncoder(), ["city"])], remainder="passthrough")
    people = make_pipeline(columns, LogisticRegression()).fit(people_table(), TWO)
    skops.io.dump(people, place("people", "model.skops", people))
    frame = LogisticRegression().fit(pd.DataFrame(ROWS, columns=list("abcd")), TWO)
    skops.io.dump(frame, place("frame", "model.skops", frame))
    texts = make_pipeline(CountVectorizer(), LogisticRegression()).fit(TEXTS, [1, 0, 1, 0])
    skops.io.dump(texts, place("texts", "model.skops", texts))


def train(root: Path) -> Trained:
    """Train all models and write them into a repository."""
    import treelite

    models: dict[str, Any] = {}

    def place(name: str, file: str, model: Any, config: str = "") -> Path:
        (root / name / "1").mkdir(parents=True)
        if config:
            (root / name / "config.pbtxt").write_text(config)
        models[name] = model
        return root / name / "1" / file

    train_sklearn(place)
    boost("binary:logistic", TWO).save_model(place("xgb_two", "model.json", boost("binary:logistic", TWO)))
    three = boost("multi:softmax", THREE, num_class=3)
    three.save_model(place("xgb_three", "model.ubj", three))
    value = boost("reg:squarederror", ROWS[:, 2])
    value.save_model(place("xgb_value", "model.ubj", value, parameter("execution", "native")))
    two = light("binary", TWO)
    two.save_model(place("lgb_two", "model.txt", two))
    three = light("multiclass", THREE, num_class=3)
    three.save_model(place("lgb_three", "model.txt", three))

    binary, multi = boost("binary:logistic", TWO), boost("multi:softprob", THREE, num_class=3)
    binary.save_model(place("fil_class", "xgboost.json", binary, FIL % (1, "xgboost_json", "true", "false")))
    binary.save_model(place("fil_both", "xgboost.ubj", binary, FIL % (2, "xgboost_ubj", "true", "true")))
    light_value = light("regression", ROWS[:, 2])
    light_value.save_model(place("fil_value", "model.txt", light_value, FIL % (1, "lightgbm", "false", "false")))
    checkpoint = place("fil_checkpoint", "checkpoint.tl", multi, FIL % (3, "treelite_checkpoint", "true", "true"))
    treelite.frontend.from_xgboost(multi).serialize(str(checkpoint))
    return Trained(root, models)
