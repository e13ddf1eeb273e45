"""A server for models of every kind."""

import os

# The builds of ONNX Runtime since 1.29 tell their maker of every session and model, and keep an id of the machine in
# the home directory. They ask this variable once, when they are first imported, also in processes that a server
# starts: so it stands here. Whoever wants to be counted sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
