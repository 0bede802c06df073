"""Which worker is added or removed: one at a time, patiently, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from deploy.ray_scaling import (
    PATIENCE,
    Bounds,
    Change,
    Patience,
    Seen,
    next_change,
    read,
)

ANY = Bounds(least={"prefill": 1, "decode": 1}, most={"prefill": 64, "decode": 64})


def pool(prefill: int, decode: int, placed: int = 0) -> list[Seen]:
    return [
        Seen(name=f"{role}-{number}", role=role, num_placed=placed + number)
        for role, count in (("prefill", prefill), ("decode", decode))
        for number in range(count)
    ]


def settled(workers, wanted, bounds=ANY):
    """What comes of looking often enough."""
    patience = Patience()
    for _ in range(PATIENCE):
        change, patience = next_change(workers, wanted, bounds, patience)
    return change


def test_what_is_wanted_only_for_a_moment_changes_nothing():
    patience = Patience()
    for wanted in ({"prefill": 2, "decode": 1}, {"prefill": 1, "decode": 1}) * PATIENCE:
        change, patience = next_change(pool(1, 1), wanted, ANY, patience)
        assert change is None


def test_what_lacks_comes_before_what_is_too_much():
    assert settled(pool(3, 1), {"prefill": 1, "decode": 2}) == Change(role="decode")


def test_the_one_with_the_fewest_requests_leaves():
    workers = pool(1, 3, placed=2)
    assert settled(workers, {"prefill": 1, "decode": 1}) == Change(role="decode", remove="decode-0")


def test_nothing_is_done_while_a_worker_comes_or_goes():
    leaving = [*pool(1, 1), Seen(name="decode-9", role="decode", num_placed=0, leaving=True)]
    for workers, coming in ((leaving, 0), (pool(1, 1), 1)):
        patience = Patience()
        for _ in range(2 * PATIENCE):
            change, patience = next_change(
                workers, {"prefill": 5, "decode": 5}, ANY, patience, num_coming=coming
            )
            assert change is None


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.fixed_dictionaries({"prefill": st.integers(0, 9), "decode": st.integers(0, 9)}),
)
def test_it_comes_to_what_is_wanted_within_the_bounds_and_stays(prefill, decode, wanted):
    bounds = Bounds(least={"prefill": 1, "decode": 2}, most={"prefill": 3, "decode": 4})
    counts = {"prefill": prefill, "decode": decode}
    for _ in range(20):
        change = settled(pool(**counts), wanted, bounds)
        if change is None:
            break
        counts[change.role] += 1 if change.remove is None else -1
    assert settled(pool(**counts), wanted, bounds) is None
    assert counts == {
        role: min(max(wanted[role], bounds.least[role]), bounds.most[role]) for role in counts
    }


def test_the_schedulers_page_is_read():
    found = {
        "wanted": {"prefill": 2, "decode": 3},
        "workers": [
            {
                "worker": "decode-0/ab12",
                "role": "decode",
                "turning": False,
                "draining": True,
                "num_placed": 4,
            }
        ],
    }
    workers, wanted = read(found)
    assert workers == [Seen(name="decode-0", role="decode", num_placed=4, leaving=True)]
    assert wanted == {"prefill": 2, "decode": 3}
