"""Instances in child processes: the server's side of each child, and the code inside it.

In the server an `instance.py: ProcessInstance` stands for each child; `supervisor.py` keeps it running, and
`child_connection.py` talks to it. In the child, `child.py` builds the instance and executes batches; its end of the
connection is `server_connection.py`. Both ends share `messages.py`, `packing.py`, `channel.py` and `shared_buffer.py`.
"""
