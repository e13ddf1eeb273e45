"""Stands for the library of this name in a rehearsal."""

from support.rehearsed_tensorrt import library

globals().update(library(__name__))
