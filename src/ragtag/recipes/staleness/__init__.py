""" "Toward Understanding the Impact of Staleness in Distributed Machine Learning" (Dai et al., ICLR 2019).

``model`` is training under a controlled delay. ``tasks`` and ``others`` have the models to train. ``tune``
chose learning rates.
"""
