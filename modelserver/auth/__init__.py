"""Permissions of callers: API keys, scopes, limits per caller."""
