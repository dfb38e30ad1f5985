"""Progressive grouping (balancing stragglers against staleness), beside eleven other methods.

``training`` is training without a common pace, ``methods`` has the methods, ``central`` trains with the
machines that run live. ``compensation`` measures whether delay compensation helps. ``measure`` lists the
jobs.
"""
