"""The runner: what executes on a host for the time of a session.

Everything below this package is standard library only, works from Python 3.8 on, is read as text by
the controller and sent over the wire. It never imports the rest of fleetfix; host modules may import
one another as `from fleetfix.remote import NAME`, which the runner answers on the host too.
"""
