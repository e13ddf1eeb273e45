"""What every API of language models is made of: calls that become events, and the framing of answers."""
