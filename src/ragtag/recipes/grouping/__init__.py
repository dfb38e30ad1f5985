"""Progressive grouping (balancing stragglers against staleness), beside other methods.

``training`` is a user's training loop without a common pace, ``methods`` has what it asks of the crew's
optimizer, ``gossip`` a baseline. ``counts`` measures how much updates count, ``compensation`` whether delay
compensation helps. ``measure`` lists the jobs.
"""
