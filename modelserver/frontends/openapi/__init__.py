"""`/openapi.json`, the description of all that a port serves, and `/docs`, the page that shows it."""
