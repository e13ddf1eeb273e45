"""The server's options: flags, environment, files."""
