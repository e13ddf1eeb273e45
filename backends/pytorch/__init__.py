"""The pytorch backend: TorchScript (`model.pt`) and torch.export programs (`model.pt2`)."""

from .backend import TorchBackend

BACKEND = TorchBackend
