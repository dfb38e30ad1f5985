"""The optimizer that a script holds: a torch optimizer whose model is averaged with a crew's.

``optimizer`` steps and asks its exchange to average; ``scheduling`` says when and with which peers
(``ragtag.schedules``), ``speeds`` how fast each peer goes; ``modes`` whether models or gradients are
averaged; ``weight`` how much a peer counts.
"""
