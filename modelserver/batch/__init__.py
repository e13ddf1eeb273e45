"""Offline batches: files of rows through a model into files of answers, resumed after a kill without a lost row."""
