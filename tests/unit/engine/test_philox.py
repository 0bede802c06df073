"""The generator is Philox4x32-10, and a number depends on its key and position alone."""

import pytest

from engine.philox import philox4x32, uniform


# Known answers of the authors' Random123 library, kat_vectors.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_is_a_function_of_its_arguments() -> None:
    assert uniform(1, 0, 5) == uniform(1, 0, 5)
    different = {uniform(1, 0, 5), uniform(2, 0, 5), uniform(1, 1, 5), uniform(1, 0, 6)}
    assert len(different) == 4


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed_gives_numbers_below_one_with_the_right_mean(seed: int) -> None:
    numbers = [uniform(seed, 0, position) for position in range(2000)]
    assert all(0.0 <= each < 1.0 for each in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03
