"""Layers are pushed one by one where the link's own measurements say that it pays."""

from kv_transfer.cost import PushCost

BLOCK_BYTES, LAYERS = 368_640, 30


def learned(*, per_piece_s, per_byte_s):
    cost = PushCost()
    for blocks in (4, 32, 8, 16):
        for pieces in (blocks, blocks * LAYERS):
            num_bytes = blocks * BLOCK_BYTES
            cost.observe_push(
                pieces=pieces,
                num_bytes=num_bytes,
                seconds=pieces * per_piece_s + num_bytes * per_byte_s,
            )
    cost.observe_step(expected_s=1.0, actual_s=1.0)
    return cost


def pays(cost, *, compute_s, num_blocks=32):
    return cost.layerwise_pays(
        num_blocks=num_blocks, num_layers=LAYERS, block_bytes=BLOCK_BYTES, compute_s=compute_s
    )


def test_what_was_measured_is_predicted():
    cost = learned(per_piece_s=5e-6, per_byte_s=1e-9)
    predicted_s = cost.push_s(pieces=100, num_bytes=10_000_000)
    assert abs(predicted_s - (100 * 5e-6 + 10_000_000 * 1e-9)) < 1e-6


def test_a_slow_link_beside_a_long_step_pays():
    assert pays(learned(per_piece_s=5e-6, per_byte_s=1e-8), compute_s=0.5)


def test_a_fast_link_with_dear_pieces_does_not():
    assert not pays(learned(per_piece_s=1e-4, per_byte_s=1e-10), compute_s=0.01)


def test_a_step_too_short_to_hide_behind_does_not_pay():
    cost = learned(per_piece_s=2e-5, per_byte_s=1e-9)
    assert not pays(cost, compute_s=0.0)


def test_pushing_that_slows_the_step_stops_paying():
    cost = learned(per_piece_s=5e-6, per_byte_s=1e-8)
    for _ in range(30):
        cost.observe_step(expected_s=0.5, actual_s=0.9)
    assert not pays(cost, compute_s=0.5)


def test_nothing_is_tried_before_anything_was_measured():
    assert not pays(PushCost(), compute_s=1.0)


def test_the_other_way_is_tried_now_and_then():
    cost = learned(per_piece_s=1e-4, per_byte_s=1e-10)
    assert sum(pays(cost, compute_s=0.01) for _ in range(640)) == 10


def test_pieces_of_one_size_are_enough_for_a_first_guess():
    cost = PushCost()
    cost.observe_push(pieces=8, num_bytes=8 * BLOCK_BYTES, seconds=0.1)
    assert abs(cost.push_s(pieces=16, num_bytes=16 * BLOCK_BYTES) - 0.2) < 1e-9
