""" "Moshpit SGD" (Ryabinin et al., NeurIPS 2021): its averaging, and what it is compared with.

``plan`` says what is run and the paper's table, ``run`` is one run.
"""
