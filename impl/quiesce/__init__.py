"""Zero-copy tensor transport in which every buffer knows when it may be written again."""

import os

__version__ = "0.1.0"

if os.environ.get("QUIESCE_TRACE"):
    from quiesce import recording

    recording.start(os.environ["QUIESCE_TRACE"])
