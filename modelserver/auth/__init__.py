"""Who may do what: API keys, scopes, limits per caller."""
