"""Shared by wires and frontends: requests, answers, statuses and limits of both protocols. No socket, no handler."""
