"""What pushing KV costs on one link, learned from what was pushed; whether to push layer by layer.

Pushing whole blocks after a prompt's last chunk leaves their copy exposed: nothing is computed
meanwhile. Pushing each layer as it is computed hides all but the last layer's share, for more and
smaller pieces, each with a cost of its own, and for what the pushing thread takes from the compute
thread where cores are few. All of these are measured on the link itself; none is a constant.
"""

_DECAY = 0.9  # of what was learned, per observation
# One in so many decisions tries the other way, so that a change of the link is noticed.
_EXPLORE_EVERY = 64
_FEWEST_BLOCKS = 2  # of one block or less there is nothing to learn


class PushCost:
    """Seconds per piece and per byte of one link, by least squares over decayed observations."""

    def __init__(self) -> None:
        self._pp = self._pb = self._bb = self._ps = self._bs = 0.0
        self._slowdown = 0.0  # of a step while layers are pushed beside it, as a share of its time
        self._decisions = 0
        self._layerwise_seen = False

    def observe_push(self, *, pieces: int, num_bytes: int, seconds: float) -> None:
        """So many pieces of so many bytes in all took this long."""
        if pieces == 0:
            return
        p, b = float(pieces), float(num_bytes)
        self._pp = _DECAY * self._pp + p * p
        self._pb = _DECAY * self._pb + p * b
        self._bb = _DECAY * self._bb + b * b
        self._ps = _DECAY * self._ps + p * seconds
        self._bs = _DECAY * self._bs + b * seconds

    def observe_step(self, *, expected_s: float, actual_s: float) -> None:
        """A step beside which layers were pushed took this long instead of what it should."""
        self._layerwise_seen = True
        if expected_s > 0:
            slowdown = max(0.0, actual_s / expected_s - 1.0)
            self._slowdown = _DECAY * self._slowdown + (1 - _DECAY) * slowdown

    def push_s(self, *, pieces: int, num_bytes: int) -> float:
        """Predicted seconds of a push."""
        determinant = self._pp * self._bb - self._pb * self._pb
        if determinant > 1e-6 * self._pp * self._bb:
            per_piece = (self._ps * self._bb - self._bs * self._pb) / determinant
            per_byte = (self._bs * self._pp - self._ps * self._pb) / determinant
            if per_piece >= 0 and per_byte >= 0:
                return pieces * per_piece + num_bytes * per_byte
        # Pieces of one size only, so far: the two cannot be told apart.
        return num_bytes * self._bs / self._bb if self._bb else 0.0

    def layerwise_pays(
        self, *, num_blocks: int, num_layers: int, block_bytes: int, compute_s: float
    ) -> bool:
        """Whether to push these blocks layer by layer beside a step of `compute_s`."""
        if num_blocks < _FEWEST_BLOCKS or num_layers < 2 or self._bb == 0:
            return False
        num_bytes = num_blocks * block_bytes
        whole_s = self.push_s(pieces=num_blocks, num_bytes=num_bytes)
        pieces_s = self.push_s(pieces=num_blocks * num_layers, num_bytes=num_bytes)
        hidden_s = compute_s * (num_layers - 1) / num_layers
        exposed_s = max(pieces_s / num_layers, pieces_s - hidden_s) + self._slowdown * compute_s
        pays = exposed_s < whole_s
        self._decisions += 1
        if self._decisions % _EXPLORE_EVERY == 0 or (pays and not self._layerwise_seen):
            return not pays if self._layerwise_seen else True
        return pays
