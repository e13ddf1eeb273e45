"""What frontends call: data plane, control plane, and what stands between them and the models."""
