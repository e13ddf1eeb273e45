"""config.pbtxt: schema, parsing with positions, rules and defaults."""
