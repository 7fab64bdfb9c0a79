"""Messages of distributed stores: decoding inverts encoding, and damaged bytes raise errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.wire import (
    INLINE,
    SIZE,
    Message,
    MessageKind,
    View,
    clip,
    decode,
    digest,
    view_bytes,
)

messages = st.builds(
    Message,
    st.sampled_from(MessageKind),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=INLINE),
)


@given(messages)
def test_round_trip(message: Message):
    """A decoded message equals the encoded one, and its bytes fit into the receive buffer."""
    data = message.encode()
    assert len(data) <= SIZE
    assert decode(bytearray(data), 3) == message


@given(messages, st.data())
def test_mutations_are_errors_or_messages(message: Message, data: st.DataObject):
    """Bytes that were changed, cut or extended give a message or an error that names the sender."""
    raw = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw + b"x"
    refused = None
    try:
        actual = decode(raw, 7)
    except KVStoreError as error:
        refused = str(error)
    assert "rank 7" in refused if refused is not None else len(actual.payload) <= INLINE + 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"\x80\x04" + bytes(60), "not a message of this version"),
        (Message(MessageKind.READY, 0, bytes(8)).encode().replace(b"\x01\x00", b"\x63\x00", 1), "unknown kind 99"),
        (Message(MessageKind.READY, 0, bytes(8), 0, b"abc").encode()[:-1], "its header says"),
    ],
)
def test_errors_say_what_came(data: bytes, words: str):
    """Decoding a damaged message raises a KVStoreError that describes the damage."""
    with pytest.raises(KVStoreError, match=words):
        decode(data, 1)


def test_long_texts_are_cut():
    """``clip`` shortens long texts to ``INLINE`` bytes with "..." at the end; digests of different texts differ."""
    assert len(clip("ä" * INLINE)) == INLINE
    assert Message(MessageKind.TEXT, 0, bytes(8), payload=clip("ä" * INLINE)).text.endswith("...")
    assert digest("a") != digest("b")
    assert digest("a") == digest("a")


@given(st.integers(1, 40), st.data())
def test_views_come_back(size: int, data: st.DataObject):
    """A decoded view equals the encoded one.

    A wrong length, a wrong prefix and ranks beyond the job raise errors that name the sender.
    """
    gone = frozenset(data.draw(st.sets(st.integers(0, size - 1))))
    view = View(data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, 2**64 - 1)), gone)
    raw = view.encode(size)
    assert len(raw) == view_bytes(size)
    assert View.decode(raw, 3, size) == view
    assert view.agrees(View(view.epoch, 0, gone))
    assert not view.agrees(None)
    beyond = raw[:-1] + bytes([raw[-1] | 1 << (size % 8)]) if size % 8 else b"\x80\x04" + raw[2:]
    for bad in (raw + b"x", raw[:-1], beyond, b"WFT1" + raw[4:]):
        with pytest.raises(KVStoreError, match="rank 3 sent"):
            View.decode(bad, 3, size)
