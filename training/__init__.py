"""Makes the models of model_repository/: `python -m training.train`."""
