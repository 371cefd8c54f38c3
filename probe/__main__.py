"""`python -m probe`."""

from probe.cli import run

if __name__ == "__main__":
    run()
