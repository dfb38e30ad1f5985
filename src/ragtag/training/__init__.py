"""Training, and what it asks of a network (``averager``): torch above, machines and transports below.

``optimizer`` is the crew's torch.optim.Optimizer; ``exchange`` is what it does with a model in each round;
``samples`` deals the data, ``state`` captures and restores, ``align`` keeps replicas alike that average
gradients. ``conduct`` is a schedule at work; ``bucket`` the table that is averaged; ``modes`` models or
gradients.
"""
