"""KServe v2 with Triton's extensions over gRPC, with codecs of our own around the tensors."""
