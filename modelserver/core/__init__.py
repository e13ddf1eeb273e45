"""The words that every other room uses: datatypes, tensors, requests, responses, streams, time."""
