"""``python -m fenceguard.cli`` is the command `fenceguard`."""

from fenceguard.cli import main

if __name__ == "__main__":
    main()
