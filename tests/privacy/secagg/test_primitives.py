"""The primitives give the published answers through the very functions that the protocol calls."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from roundtable.core.errors import IdentityError, PrivacyError, ProtocolError
from roundtable.privacy.secagg import keys
from roundtable.privacy.secagg.masks import (
    PIECE_BYTES,
    RING_BITS,
    MaskSum,
    pack,
    ring_dtype,
    unpack,
    wire_bytes,
)

hexed = bytes.fromhex

ALICE = hexed("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = hexed("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
ALICE_PUBLIC = hexed("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
AGREED = hexed("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")


def test_x25519_agrees_as_rfc_7748_section_6_1() -> None:
    alice, bob = keys.KeyPair(ALICE), keys.KeyPair(BOB)
    assert alice.public == ALICE_PUBLIC
    assert alice.agree(bob.public, "bob") == bob.agree(alice.public, "alice") == AGREED


def test_ed25519_signs_as_rfc_8032_section_7_1_test_1() -> None:
    signer = keys.Ed25519Signer(
        Ed25519PrivateKey.from_private_bytes(
            hexed("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
        )
    )
    signature = hexed(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b"
    )
    assert signer.public == hexed("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert signer.sign(b"") == signature
    verify = keys.verifier(signer.public, "silo")
    assert verify(signature, b"")
    assert not verify(signature, b"x")


def test_hkdf_expands_as_rfc_5869_appendix_a_1() -> None:
    key = keys._hkdf(b"\x0b" * 22, hexed("000102030405060708090a0b0c"), hexed("f0f1f2f3f4f5f6f7f8f9"))
    assert key == hexed("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf")


def test_mask_expansion_is_aes_256_in_counter_mode() -> None:
    """E(0, 2) is the first block of GCM test case 14; the rest is plain counter mode from there on."""
    piece = np.zeros(PIECE_BYTES // 4 + 1000, dtype=np.uint32)
    for keys_added, keys_taken in (([bytes(32)], []), ([], [bytes(32)])):
        masks = MaskSum(32, keys_added, keys_taken)
        masks.add_to(piece[: PIECE_BYTES // 4])
        masks.add_to(piece[PIECE_BYTES // 4 :])
        if keys_added:
            counter = Cipher(AES(bytes(32)), CTR((2).to_bytes(16, "big"))).encryptor()
            assert piece.tobytes() == counter.update(bytes(piece.nbytes))
            assert piece.tobytes()[:16] == hexed("cea7403d4d606b6e074ec5d3baf39d18")
    assert not piece.any()


def test_a_vector_is_no_longer_than_a_keystream() -> None:
    with pytest.raises(ProtocolError, match="longer than a mask"):
        keys.Session("job", 1, 0, keys.MAXIMUM_LENGTH + 1)


def test_aes_gcm_seals_as_nist_test_case_16() -> None:
    cipher = AESGCM(hexed("feffe9928665731c6d6a8f9467308308" * 2))
    sealed = cipher.encrypt(
        hexed("cafebabefacedbaddecaf888"),
        hexed(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
            "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
        ),
        hexed("feedfacedeadbeeffeedfacedeadbeefabaddad2"),
    )
    assert sealed == hexed(
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b"
    )


def test_blake3_of_nothing() -> None:
    assert blake3(b"").hexdigest() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_keys_of_low_order_are_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="mallory"):
        keys.KeyPair().agree(bytes(32), "mallory")


def test_an_erased_key_pair_can_do_nothing() -> None:
    pair = keys.KeyPair()
    pair.erase()
    with pytest.raises(ProtocolError, match="erased"):
        pair.private_bytes()
    with pytest.raises(ProtocolError, match="erased"):
        pair.agree(ALICE_PUBLIC, "alice")


def test_an_identity_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(IdentityError, match="silo-a"):
        keys.verifier(b"short", "silo-a")


def test_every_derived_key_differs() -> None:
    one, two = bytes(32), b"\1" * 32
    derived = {
        keys.mask_key(AGREED, one, 0, 1),
        keys.mask_key(AGREED, one, 0, 2),
        keys.mask_key(AGREED, two, 0, 1),
        keys.self_mask_key(AGREED, one, 0),
        keys.self_mask_key(AGREED, one, 1),
        keys.seed_commitment(AGREED, one, 0),
    }
    assert len(derived) == 6
    assert keys.mask_key(AGREED, one, 2, 5) == keys.mask_key(AGREED, one, 5, 2)


@pytest.mark.parametrize("change", ["binding", "sender", "receiver", "direction", "box"])
def test_a_box_opens_only_where_it_belongs(change: str) -> None:
    box = keys.ShareBox(AGREED, bytes(32), 3, 4).seal(b"s" * 64)
    assert len(box) == keys.BOX_BYTES
    assert keys.ShareBox(AGREED, bytes(32), 3, 4).open(box, "silo") == b"s" * 64
    binding = b"\1" * 32 if change == "binding" else bytes(32)
    pair = {"sender": (2, 4), "receiver": (3, 5), "direction": (4, 3)}.get(change, (3, 4))
    if change == "box":
        box = bytes([box[0] ^ 1]) + box[1:]
    with pytest.raises(ProtocolError, match="silo-x"):
        keys.ShareBox(AGREED, binding, *pair).open(box, "silo-x")


@pytest.mark.parametrize("ring_bits", RING_BITS)
def test_packing_is_exact_and_as_small_as_the_ring(ring_bits: int) -> None:
    values = np.random.default_rng(1).integers(0, 1 << ring_bits, 1001).astype(ring_dtype(ring_bits))
    wire = pack(values, ring_bits)
    assert len(wire) == wire_bytes(1001, ring_bits)
    np.testing.assert_array_equal(unpack(wire, ring_bits), values)


def test_bytes_that_are_no_whole_elements_are_refused() -> None:
    with pytest.raises(ProtocolError, match="24-bit"):
        unpack(memoryview(bytes(4)), 24)
    with pytest.raises(ProtocolError, match="12-bit"):
        unpack(memoryview(bytes(4)), 12)
    with pytest.raises(ProtocolError, match="four bits"):
        unpack(memoryview(b"\x01\x10"), 12)
    with pytest.raises(PrivacyError, match="20 bits"):
        ring_dtype(20)


@pytest.mark.parametrize("ring_bits", RING_BITS)
def test_masks_of_pieces_are_the_mask_of_the_whole(ring_bits: int) -> None:
    """The keystream runs on across pieces, whatever their length."""
    dtype = ring_dtype(ring_bits)
    step = PIECE_BYTES // dtype.itemsize
    whole = np.zeros(step + 40, dtype=dtype)
    masks = MaskSum(ring_bits, [b"k" * 32], [b"l" * 32])
    masks.add_to(whole[:step])
    masks.add_to(whole[step:])
    small = np.zeros(step + 40, dtype=dtype)
    masks = MaskSum(ring_bits, [b"k" * 32], [b"l" * 32])
    for start in range(0, len(small), 16):
        masks.add_to(small[start : start + 16])
    np.testing.assert_array_equal(whole, small)
    assert len(np.unique(whole[:5000])) > min(2800, 0.9 * (1 << ring_bits))
