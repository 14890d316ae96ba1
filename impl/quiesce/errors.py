"""The errors quiesce raises: one root, one class for each thing a caller would handle differently."""

from __future__ import annotations


class QuiesceError(Exception):
    """Root of every error raised by this library."""


class QuiesceTimeout(QuiesceError, TimeoutError):
    """A bounded wait ran out. Nothing was sent or received, and the call may be repeated.

    Except on a stage link: its transport has given a message up, and the link ends with it.
    """


class Closed(QuiesceError):
    """The object was closed, by this process or by its peer."""


class NotQuiescent(QuiesceError):
    """Somebody who was promised the old bytes may still read them."""


class EncodeError(QuiesceError, TypeError):
    """The object holds something that cannot be encoded; nothing was sent."""


class DecodeError(QuiesceError, ValueError):
    """The bytes received are not a message of this library, or are inconsistent; nothing was built from them."""


class PeerDied(QuiesceError):
    """The other side is gone. The message names it, as far as it is known: a rank, a process, an endpoint."""


class WrongProcess(QuiesceError):
    """The object was made in another process and cannot be used after fork."""


class ResourceExhausted(QuiesceError, OSError):
    """Shared memory, file descriptors or another bounded resource ran out before anything was changed."""
