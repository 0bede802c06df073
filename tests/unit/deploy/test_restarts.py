"""When a child that ended may start again."""

from deploy.restarts import Restarts


def _delays(restarts: Restarts, lives: list[tuple[float, bool, float]]) -> list[float | None]:
    return [
        restarts.next_delay_s(lived_s=lived, was_ready=ready, now_s=now)
        for lived, ready, now in lives
    ]


def test_the_wait_doubles_up_to_its_bound():
    crashes = [(1.0, True, 10.0 * i) for i in range(8)]
    assert _delays(Restarts(), crashes) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_long_life_wipes_the_crashes_before_it_out():
    restarts = Restarts()
    _delays(restarts, [(1.0, True, 0.0), (1.0, True, 1.0)])
    assert _delays(restarts, [(31.0, True, 40.0), (1.0, True, 41.0)]) == [0.1, 0.2]


def test_ten_crashes_within_a_minute_are_the_end():
    crashes = [(1.0, True, 6.0 * i) for i in range(10)]
    assert _delays(Restarts(), crashes)[-2:] == [5.0, None]


def test_ten_crashes_over_more_than_a_minute_are_not():
    crashes = [(1.0, True, 7.0 * i) for i in range(20)]
    assert None not in _delays(Restarts(), crashes)


def test_what_has_never_served_is_given_up_after_three_tries():
    assert _delays(Restarts(), [(1.0, False, float(i)) for i in range(3)]) == [0.1, 0.2, None]


def test_what_has_served_once_is_not_given_up_that_soon():
    lives = [(1.0, True, 0.0), *((1.0, False, float(i)) for i in range(1, 5))]
    assert None not in _delays(Restarts(), lives)
