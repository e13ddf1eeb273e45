"""The console: pages for a browser that show the server and talk to its models."""
