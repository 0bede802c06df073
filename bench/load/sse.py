"""Server-sent events, as the WHATWG specification frames them, out of pieces of any size."""


class SseReader:
    """Bytes in, the data of whole events out. Comments and other fields than `data` are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completed."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        whole = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                whole.append(b"\n".join(self._data))
                self._data = []
        return whole
