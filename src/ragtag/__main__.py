"""``python -m ragtag``: the ``ragtag`` command."""

from ragtag.app.cli.main import main

if __name__ == "__main__":
    main()
