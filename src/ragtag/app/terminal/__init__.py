"""What people read in a terminal.

``dashboard`` is a run as a table of peers (``peers`` is what is known of them, ``watch`` follows trace
files); ``run_view`` and ``simulate_view`` are what the commands print; ``output`` what peers print;
``words`` puts it in English; ``console`` is one that no run depends on.
"""
