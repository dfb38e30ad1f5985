"""RPS: "Distributed Learning over Unreliable Networks" (Yu et al., ICML 2019).

``theory`` is the mixing matrix, closed and measured; ``training`` trains replicas under loss; ``measure``
lists the jobs.
"""
