"""``python -m kalign_core``: the command line, for where the name ``kalign`` is somebody else's script."""

from kalign_core.cli.main import main

if __name__ == "__main__":
    main()
