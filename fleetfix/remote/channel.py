"""Frames between controller and host, the host's end: four bytes of length, then JSON. Never waits."""

import collections
import fcntl
import json
import os
import struct

LARGEST_IN = 8 * 1024 * 1024
LARGEST_OUT = 1024 * 1024


class Lost(Exception):
    """The controller is gone, or speaks nonsense."""


class Channel:
    """Frames over stdin and stdout."""

    def __init__(self, source=0, sink=1):
        self.source = source
        self.sink = sink
        self.waiting = 0
        self._in = bytearray()
        self._out = collections.deque()
        for fd in (source, sink):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)

    def receive(self):
        """The frames that have arrived. Raises Lost at the end."""
        try:
            data = os.read(self.source, 262144)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Lost(str(error)) from error
        if not data:
            raise Lost("end of input")
        self._in += data
        return self._whole()

    def _whole(self):
        frames = []
        while len(self._in) >= 4:
            (size,) = struct.unpack_from(">I", self._in)
            if size > LARGEST_IN:
                raise Lost("a frame of %d bytes" % size)
            if len(self._in) < 4 + size:
                break
            try:
                frame = json.loads(bytes(self._in[4 : 4 + size]))
            except (ValueError, RecursionError) as error:
                raise Lost("not a frame: %s" % error) from error
            if not isinstance(frame, dict):
                raise Lost("not a frame")
            frames.append(frame)
            del self._in[: 4 + size]
        return frames

    def send(self, frame, first=False):
        """Queue a frame; `first` puts it before all that has not begun to go out."""
        data = json.dumps(frame, separators=(",", ":")).encode()
        if len(data) > LARGEST_OUT:
            small = {key: frame[key] for key in ("n", "i") if key in frame}
            small["error"] = {
                "kind": "bug",
                "message": "an answer of %d bytes is too long for a frame" % len(data),
            }
            data = json.dumps(small).encode()
        data = struct.pack(">I", len(data)) + data
        self.waiting += len(data)
        if first and self._out:
            self._out.insert(1, data)
        else:
            self._out.append(data)
        self.flush()

    def flush(self):
        """Send what the channel takes now. Raises Lost where the other end is closed."""
        while self._out:
            data = self._out[0]
            try:
                sent = os.write(self.sink, data)
            except BlockingIOError:
                return
            except OSError as error:
                raise Lost(str(error)) from error
            self.waiting -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = data[sent:]
