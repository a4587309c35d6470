# SPDX-License-Identifier: Apache-2.0
"""The random numbers of draws (`pagoda.backend.reference.sampling`)."""

from __future__ import annotations

import pytest

from pagoda.backend.reference.sampling import philox4x32, uniform_bits

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Vectors of the Random123 distribution, file kat_vectors."""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_numbers_are_in_range_and_even() -> None:
    numbers = [
        uniform_bits(seed, position) * 2.0**-53 for seed in range(50) for position in range(40)
    ]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert [sum(n * 10 // 1 == digit for n in numbers) for digit in range(10)] == pytest.approx(
        [200] * 10, abs=50
    )


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert uniform_bits(-1, 3) == uniform_bits(2**64 - 1, 3)
    assert uniform_bits(-(2**63), 0) == uniform_bits(2**63, 0)
    assert uniform_bits(5, 0) != uniform_bits(5 + 2**32, 0)
    assert uniform_bits(5, 0) != uniform_bits(5, 2**32)
