"""Protobuf messages generated from protos/ by protos/generate.py, in a private descriptor pool."""
