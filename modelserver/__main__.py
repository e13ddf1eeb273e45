"""`python -m modelserver` is the `modelserver` command."""

from modelserver.cli.main import main

if __name__ == "__main__":
    main()
