"""The planes that frontends call, for data and for control, and the parts between them and the models."""
