"""What people read in a terminal.

``dashboard`` is a run as a table of peers (``peers`` is what is known of them, ``watch`` follows trace
files); ``run_view`` and ``simulate_view`` are what the commands print; ``output`` and ``tracebacks`` what
peers print; ``words``, ``noted`` and ``alike`` put it in English; ``spared`` is a console that no run
depends on.
"""
