"""`python -m fleetfix`: the same as the command `fleetfix`."""

from fleetfix.cli.main import run

if __name__ == "__main__":
    run()
