"""What wires and frontends share: requests, answers, statuses and limits of both protocols. No socket, no handler."""
