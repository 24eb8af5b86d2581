"""A stand-in of a kubelet: it is there, under its name, and does nothing."""

import signal

while True:
    signal.pause()
