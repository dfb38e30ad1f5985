"""Progressive grouping (balancing stragglers against staleness), and eleven methods that it is compared with.

``training`` is training without a common pace, ``methods`` the methods at work, ``central`` the machines
that run live; ``compensation`` asks whether delay compensation helps; ``measure`` lists the jobs.
"""
