"""The commands, a module each. They stand on `client/` and import what they need when they are called."""
