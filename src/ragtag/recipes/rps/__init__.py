"""RPS: "Distributed Learning over Unreliable Networks" (Yu et al., ICML 2019).

``theory`` has the mixing matrix, in closed form and measured. ``training`` trains replicas under loss.
``measure`` lists the jobs.
"""
