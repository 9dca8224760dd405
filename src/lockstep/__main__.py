"""`python -m lockstep`, so that torchrun and its kin can start it."""

from lockstep.cli.main import command

if __name__ == "__main__":
    command()
