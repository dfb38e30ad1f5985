""" "Moshpit SGD" (Ryabinin et al., NeurIPS 2021): its averaging, beside other methods.

``plan`` has the runs and the paper's table, ``run`` is one run.
"""
