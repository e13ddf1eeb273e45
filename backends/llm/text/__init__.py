"""From text to tokens and back: tokenizers, chat templates, incremental detokenisation, stop strings."""
