"""NoPeek (Vepakomma et al.): accuracy against what a cut's codes tell."""
