"""Instances in child processes: the server's side of each child, and the code inside it.

In the server an `instance.py: ProcessInstance` stands for each child; `supervisor.py` keeps it running, and on the
event loop `supervised_child.py` hands it batches through `child_connection.py`. In the child, `child.py` builds the
instance and executes batches; its end of the connection is `server_connection.py`. Each module runs on one side, or on
both:

- server: `hosted_backend`, `worker`, `instance`, `supervised_child`, `in_flight_batch`, `supervisor`, `lifecycle`,
  `child_process`, `child_connection`, `calls_from_child`;
- child: `child_main`, `child`, `hosted_request`, `step_host`, `server_connection`, `calls_to_server`;
- both: `recipe` (made in the server, followed in the child), `hosting` (the recipe of an instance, and the instance
  built from it), `child_log` (written in the child, read in the server), `messages`, `packing`, `channel`,
  `shared_buffer`.
"""
