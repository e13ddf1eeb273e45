"""Directories of Hugging Face for tasks other than generation: texts, pictures or sound in, named tensors out.

`tasks` has a class for each task, `speech` has Whisper; `backend` serves them. Torch and transformers are imported when
a model is loaded.
"""

from .backend import BACKEND

__all__ = ["BACKEND"]
