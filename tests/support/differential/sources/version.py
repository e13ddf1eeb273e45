"""Answers with the version that answers, and what `initialize` was told."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        told = {key: self.args[key] for key in ("model_name", "model_version", "model_instance_kind")}
        told["instance"] = self.args["model_instance_name"]
        told["device"] = self.args["model_instance_device_id"]
        told["keys"] = sorted(self.args)
        told["types"] = sorted({type(value).__name__ for value in self.args.values()})
        told["config"] = sorted(json.loads(self.args["model_config"]))
        text = np.array([json.dumps(told).encode()], dtype=object)
        version = np.array([int(self.args["model_version"])], np.int32)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", version), pb_utils.Tensor("TOLD", text)])
            for _ in requests
        ]
