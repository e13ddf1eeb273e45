"""Several processes that do a wire's work (sockets, TLS, HTTP, decoding, encoding) in front of the one that batches.

The core process accepts connections and passes each to the front process with the fewest (`dealer`). A front (`front`)
serves it as a lone server would, with frontends whose inference goes to the core as decoded requests (`remote`) and
whose other calls go there whole (`forwarding`). In the core, a `session` answers a front's messages. Everything of one
loop turn crosses as one datagram (`link`, `messages`); large tensors lie in shared memory.
"""
