"""Does not load."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("cannot be initialized")

    def execute(self, requests):
        raise AssertionError("was not loaded")
