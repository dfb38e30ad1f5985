"""Values as bytes: what a chunk's bytes mean.

``base`` says what a codec is; ``dense`` has every value in order (fp32, bf16, int8), ``values`` what they
share with ``sparse``, where only some entries are sent.
"""
