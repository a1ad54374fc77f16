"""Memory-efficient DenseNets: the numbers of the plain model in a fraction of its memory."""

__version__ = "0.1.0"
