"""Zero-copy tensor transport in which every buffer knows when it may be written again."""

__version__ = "0.1.0"
