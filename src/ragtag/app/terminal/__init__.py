"""What people read in a terminal.

``dashboard`` is a run as a table of peers, made by following its trace files (``peers`` is what is known of
each); ``run_view`` and ``simulate_view`` are what the commands print; ``output`` what peers print;
``console`` is one that no run depends on. Words and figures are ``app.words``.
"""
