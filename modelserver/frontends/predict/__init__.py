"""KServe's protocol of version 1, which is TensorFlow Serving's: `/v1/models/NAME:predict`."""
