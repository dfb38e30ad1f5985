"""What a crew's optimizer does with a model in each round.

``asked`` makes objects of what a script asks for; ``combine`` is the table of what goes together. ``base``
says what an exchange is. ``dense`` and ``sparse`` exchange with the crew: a table of all values, or a
selection. Around one of them lie layers: ``outer`` (outer momentum), ``slow`` (the turns of a peer that
rounds do not wait for), ``aligned`` (replicas that average gradients are kept alike). ``CrewOptimizer`` takes
the local steps and decides when; a round goes from it through the layers to the transport, and its outcome
back.
"""
