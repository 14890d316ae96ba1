"""Mutants made by machine that the other tests did not notice, and what is now asked so that they are."""

from quiesce.payload_reuse import PayloadBuffer


def test_a_buffer_counts_the_bytes_of_payload_and_body() -> None:
    """Bits that both sizes have in common are counted twice: the sum, not what another operator makes of it."""
    buffer = PayloadBuffer()
    buffer.payload = bytearray(96)
    buffer.body = bytearray(96)
    assert len(buffer) == 192
