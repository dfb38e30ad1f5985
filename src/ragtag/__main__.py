"""``python -m ragtag``: the ``ragtag`` command."""

from ragtag.app.cli import main

if __name__ == "__main__":
    main()
