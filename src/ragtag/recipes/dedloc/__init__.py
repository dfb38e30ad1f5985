"""DeDLOC: "Distributed Deep Learning in Open Collaborations", Diskin et al., NeurIPS 2021 (arXiv 2106.10207).

``training`` has crews with a target batch, in lockstep, and one process; ``mixes`` crews' lines and what
roles make of them; ``compare`` holds both against what the paper says, and draws.
"""
