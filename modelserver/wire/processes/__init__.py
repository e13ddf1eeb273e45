"""Several processes that do a wire's work (sockets, TLS, HTTP, decoding, encoding) in front of the one that batches.

The core process accepts connections and passes each to the front process with the fewest. A front serves it as a lone
server would, and has the core answer: inference goes there as decoded requests, every other call as it is. All messages
of one loop turn cross as one datagram; large tensors lie in shared memory. Each module runs on one side, or on both:

- core: `server` (accepts and passes on connections), `front_process` (keeps a front running), `session` (answers a
  front's messages) with `core_inference` (decoded requests), `exchanges` (forwarded calls), `short_exchanges` (short
  calls) and `counts` (which has the front's end too);
- front: `front` (its main program), `front_frontends` (what answers its requests) with `remote` (inference by the
  core), `forwarding` (other calls) and `short_calls` (calls shorter than their description);
- both: `link`, `messages`, `setup` (made in the core, followed in the front).
"""
