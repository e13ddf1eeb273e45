"""What the backend directory has for `backend: "gate"`."""

from support import gate

BACKEND = gate.GateBackend
